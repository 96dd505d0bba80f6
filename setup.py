"""What pyproject.toml cannot say: source folders outside the package, and (later) compiled extensions.

A plain install needs neither torch nor a compiler nor nvcc.  Extensions that need them belong in
`extensions`, each with ``optional=True`` and only when its toolchain is there.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, find_packages, setup

PLUGIN = "slidesparse.vllm_patch"  # installed from vllm_patch/
SOURCES = "slidesparse.csrc"  # installed from csrc/, to be compiled on the user's machine


def extensions() -> list[Extension]:
    """The compiled parts that this machine can build: none yet."""
    return []


packages = find_packages(include=["slidesparse", "slidesparse.*"])
packages += [PLUGIN, *(f"{PLUGIN}.{name}" for name in find_packages("vllm_patch"))]
package_dir = {"slidesparse": "slidesparse", PLUGIN: "vllm_patch"}
package_data = {"slidesparse": ["py.typed"]}
sources = [path for path in Path("csrc").rglob("*") if path.is_file() and not path.name.startswith(".")]
if sources:
    packages.append(SOURCES)
    package_dir[SOURCES] = "csrc"
    package_data[SOURCES] = [path.relative_to("csrc").as_posix() for path in sources]

setup(packages=packages, package_dir=package_dir, package_data=package_data, ext_modules=extensions())
