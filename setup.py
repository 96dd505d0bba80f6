"""Install two packages from folders of other names, which pyproject.toml cannot say.

Nothing is compiled here: `slidesparse.build` compiles what a machine needs when it is first used, or by one command.
"""

from pathlib import Path

from setuptools import find_packages, setup

# those of the kernels that serving uses; csrc/spmm is for a benchmark in a clone
SOURCES = ["cusparselt.cpp", *(f"hopper/{path.name}" for path in Path("csrc/hopper").iterdir())]

setup(
    include_package_data=False,  # only the data that is listed here
    packages=[
        *find_packages(include=["slidesparse", "slidesparse.*"]),
        "slidesparse.vllm_patch",
        "slidesparse.csrc",
    ],
    package_dir={
        "slidesparse": "slidesparse",
        "slidesparse.vllm_patch": "vllm_patch",
        "slidesparse.csrc": "csrc",
    },
    package_data={
        "slidesparse": ["py.typed", "tuned_tables/*.json", "layer_times.csv", "public_models.json"],
        "slidesparse.csrc": SOURCES,
    },
)
