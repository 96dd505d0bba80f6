"""What pyproject.toml cannot say: source folders outside the package, and compiled extensions.

A plain install needs neither torch nor a compiler nor CUDA's headers.  An extension is built when all of them that it
needs are found, and left out otherwise: `slidesparse.toolchain`, or `slidesparse.nvcc` the kernels for Hopper, then
builds it when it is first used, where it can.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from slidesparse import nvcc, toolchain  # noqa: E402  standard library only

PLUGIN = "slidesparse.vllm_patch"  # installed from vllm_patch/
SOURCES = "slidesparse.csrc"  # installed from csrc/, to be compiled on the user's machine


def extensions() -> list[Extension]:
    """The compiled parts that this machine can build."""
    sources = {name: [f"csrc/{name}.cpp"] for name in toolchain.EXTENSIONS}
    sources[nvcc.NAME] = sorted(path.as_posix() for path in Path("csrc", nvcc.NAME).glob("*.cu"))
    headers = [path.as_posix() for path in Path("csrc").rglob("*") if path.suffix in (".h", ".cuh", ".txt")]
    return [
        Extension(f"slidesparse.gemm._{name}", files, depends=headers, optional=True)
        for name, files in sources.items()
        if buildable(name)
    ]


def buildable(name: str) -> bool:
    """Whether compiler and headers are there; says what is missing where it is not."""
    try:
        if name == nvcc.NAME:
            nvcc.version(nvcc.find().path)
            toolchain.compiler()
        else:
            toolchain.command(name, Path(toolchain.file_name(name)))
    except toolchain.ToolchainError as error:
        print(f"slidesparse.gemm._{name} is left out: {error}", file=sys.stderr)
        return False
    return True


class BuildExtension(build_ext):
    """Builds extensions with the command lines that are used just in time."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one; an error of an optional extension becomes a warning."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            name = ext.name.rpartition("._")[2]
            if name == nvcc.NAME:
                nvcc.compile_to(target)
            else:
                toolchain.compile_with(toolchain.command(name, target))
        except toolchain.ToolchainError as error:
            raise CompileError(str(error)) from None


packages = find_packages(include=["slidesparse", "slidesparse.*"])
packages += [PLUGIN, *(f"{PLUGIN}.{name}" for name in find_packages("vllm_patch"))]
package_dir = {"slidesparse": "slidesparse", PLUGIN: "vllm_patch"}
package_data = {"slidesparse": ["py.typed", "tuned_tables/*.json"]}
sources = [path for path in Path("csrc").rglob("*") if path.is_file() and not path.name.startswith(".")]
if sources:
    packages.append(SOURCES)
    package_dir[SOURCES] = "csrc"
    package_data[SOURCES] = [path.relative_to("csrc").as_posix() for path in sources]

setup(
    packages=packages,
    package_dir=package_dir,
    package_data=package_data,
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension},
)
