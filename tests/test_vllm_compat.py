"""The table of what the plugin needs of vLLM: it holds for the installed vLLM and lists what the code uses.

That the checker notices a change is tested on the smallest source tree that satisfies the table, changed one by one.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import vllm_compat  # noqa: E402
from vllm_compat import req  # noqa: E402
from vllm_source import Tree  # noqa: E402

from slidesparse.backends import VLLM_OLDEST, VLLM_TESTED  # noqa: E402

PLUGIN = sorted((ROOT / "vllm_patch").glob("*.py"))
COMPRESSED = "vllm/model_executor/layers/quantization/compressed_tensors"

SMALLEST = {
    "vllm/plugins/__init__.py": """
DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
def load_general_plugins(): ...
""",
    "vllm/envs.py": "if TYPE_CHECKING:\n    VLLM_PLUGINS: list[str] | None = None\n",
    "vllm/logger.py": "def init_logger(name: str): ...\n",
    "vllm/platforms/__init__.py": "current_platform: Platform\n",
    "vllm/platforms/interface.py": """
class Platform:
    def is_cuda(self): ...
    def get_device_capability(self, device_id=0): ...
""",
    "vllm/config/__init__.py": """
from vllm.config.load import LoadConfig
from vllm.config.vllm import VllmConfig, get_current_vllm_config
""",
    "vllm/config/vllm.py": """
class VllmConfig:
    load_config: LoadConfig = Field()
    compilation_config: CompilationConfig = Field()
def get_current_vllm_config(): ...
""",
    "vllm/config/load.py": "class LoadConfig:\n    load_format: str = 'auto'\n",
    "vllm/config/compilation.py": """
class CompilationConfig:
    mode: int = 3
    backend: str = ""
    inductor_compile_config: dict = field(default_factory=dict)
""",
    "vllm/compilation/inductor_pass.py": "class InductorPass(CustomGraphPass): ...\n",
    "vllm/config/model.py": """
def verify(self, method):
    method.override_quantization_method(quant_cfg, self.quantization, hf_config=self.hf_config)
""",
    "vllm/model_executor/models/utils.py": "class WeightsMapper:\n    def _map_name(self, key): ...\n",
    "vllm/model_executor/parameter.py": """
class Base(Parameter):
    def __init__(self, data, weight_loader): ...
class Column(Base):
    def __init__(self, output_dim, **kwargs): ...
class Row(Base):
    def __init__(self, input_dim, **kwargs): ...
class ModelWeightParameter(Column, Row): ...
""",
    "vllm/model_executor/layers/linear.py": """
class LinearBase:
    def __init__(self):
        self.tp_rank = 0
        self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
""",
    "vllm/model_executor/layers/fused_moe/layer.py": "class FusedMoE: ...\n",
    "vllm/model_executor/layers/quantization/__init__.py": "def register_quantization_config(quantization): ...\n",
    "vllm/model_executor/layers/quantization/base_config.py": """
class QuantizationConfig(ABC):
    def __init__(self):
        self.packed_modules_mapping = dict()
    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None): ...
""",
    f"{COMPRESSED}/compressed_tensors.py": """
from ..base_config import QuantizationConfig
class CompressedTensorsConfig(QuantizationConfig):
    @classmethod
    def from_config(cls, config): ...
    def apply_vllm_mapper(self, hf_to_vllm_mapper): ...
    def get_quant_method(self, layer, prefix):
        return self.get_scheme(layer=layer, layer_name=prefix)
    def get_scheme(self, layer, layer_name=None): ...
class CompressedTensorsLinearMethod:
    def create_weights(self, layer, input_size_per_partition, input_size, **extra):
        layer.scheme.create_weights(
            layer=layer, input_size=input_size, input_size_per_partition=1, params_dtype=extra["dtype"],
            weight_loader=extra["weight_loader"],
        )
    def process_weights_after_loading(self, layer):
        layer.scheme.process_weights_after_loading(layer)
    def apply(self, layer, x, bias=None):
        return layer.scheme.apply_weights(layer, x, bias=bias)
""",
    f"{COMPRESSED}/schemes/__init__.py": """
from .scheme import CompressedTensorsScheme
from .w8a8 import CompressedTensorsW8A8Fp8, CompressedTensorsW8A8Int8
""",
    f"{COMPRESSED}/schemes/scheme.py": """
class CompressedTensorsScheme(ABC):
    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...
    @abstractmethod
    def create_weights(self, *args, **kwargs): ...
    @abstractmethod
    def apply_weights(self, layer, x, bias): ...
    @abstractmethod
    def process_weights_after_loading(self, layer): ...
""",
    f"{COMPRESSED}/schemes/w8a8.py": """
class CompressedTensorsW8A8Int8(CompressedTensorsScheme):
    def __init__(self, strategy, is_static_input_scheme, input_symmetric):
        self.strategy = strategy
        self.is_static_input_scheme = is_static_input_scheme
        self.input_symmetric = input_symmetric
    def create_weights(self, layer, **kwargs):
        layer.logical_widths = []
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scale)
    def process_weights_after_loading(self, layer): ...
    def apply_weights(self, layer, x, bias): ...
class CompressedTensorsW8A8Fp8(CompressedTensorsW8A8Int8): ...
""",
}

CHANGES = {  # what vLLM might do: (file, words, what they become, what the checker says)
    "a module moves": (
        "vllm/model_executor/parameter.py",
        None,
        "",
        "no module vllm.model_executor.parameter",
    ),
    "a class goes": (
        f"{COMPRESSED}/schemes/__init__.py",
        "CompressedTensorsW8A8Int8",
        "CompressedTensorsInt8",
        f"no CompressedTensorsW8A8Int8 in {COMPRESSED.replace('/', '.')}.schemes",
    ),
    "a method goes": (
        f"{COMPRESSED}/compressed_tensors.py",
        "def apply_vllm_mapper",
        "def apply_mapper",
        "no apply_vllm_mapper in CompressedTensorsConfig",
    ),
    "a parameter is renamed": (
        f"{COMPRESSED}/compressed_tensors.py",
        "get_scheme(self, layer, layer_name=None)",
        "get_scheme(self, layer, prefix=None)",
        "CompressedTensorsConfig.get_scheme takes (layer, prefix=None), ours takes (layer, layer_name=None)",
    ),
    "an inherited method takes more": (
        "vllm/model_executor/layers/quantization/base_config.py",
        "hf_config=None",
        "hf_config=None, revision=None",
        "override_quantization_method takes (hf_quant_cfg, user_quant, hf_config=None, revision=None)",
    ),
    "what we call needs more": (
        "vllm/model_executor/layers/quantization/__init__.py",
        "(quantization)",
        "(quantization, kind)",
        "takes (quantization, kind), we pass (name): missing a required argument: 'kind'",
    ),
    "a constructor's keyword is renamed": (
        "vllm/model_executor/parameter.py",
        "input_dim",
        "in_dim",
        "ModelWeightParameter takes (*, output_dim, data, weight_loader, in_dim)",
    ),
    "a new abstract method": (
        f"{COMPRESSED}/schemes/scheme.py",
        "(self, layer): ...\n",
        "(self, layer): ...\n    @abstractmethod\n    def dequantize(self, layer): ...\n",
        "CompressedTensorsScheme has a new abstract method, dequantize",
    ),
    "vLLM passes something new": (
        "vllm/config/model.py",
        "hf_config=self.hf_config",
        "model=self",
        "ours takes (hf_quant_cfg, user_quant, hf_config=None): got an unexpected keyword argument 'model'",
    ),
    "vLLM passes less": (
        f"{COMPRESSED}/compressed_tensors.py",
        "input_size=input_size, ",
        "",
        "calls create_weights without input_size",
    ),
    "vLLM calls it no longer": (
        f"{COMPRESSED}/compressed_tensors.py",
        "return layer.scheme.apply_weights(",
        "return layer.scheme.apply(",
        "CompressedTensorsLinearMethod.apply no longer calls apply_weights",
    ),
    "an attribute is renamed": (
        f"{COMPRESSED}/schemes/w8a8.py",
        "self.input_symmetric",
        "self.symmetric",
        "CompressedTensorsW8A8Int8 has no attribute input_symmetric",
    ),
    "a field goes": (
        "vllm/config/load.py",
        "load_format",
        "format",
        "LoadConfig has no attribute load_format",
    ),
    "a parameter of the layer is renamed": (
        f"{COMPRESSED}/schemes/w8a8.py",
        '"weight_scale"',
        '"scale"',
        "CompressedTensorsW8A8Int8.create_weights sets no layer.weight_scale",
    ),
    "the entry point's group": (
        "vllm/plugins/__init__.py",
        '"vllm.general_plugins"',
        '"vllm.plugins"',
        "DEFAULT_PLUGINS_GROUP is DEFAULT_PLUGINS_GROUP = 'vllm.plugins', not 'vllm.general_plugins'",
    ),
    "both names go": (
        "vllm/model_executor/layers/fused_moe/layer.py",
        "FusedMoE",
        "Experts",
        "no FusedMoE in vllm.model_executor.layers.fused_moe.layer and no module",
    ),
}


def test_the_smallest_tree_satisfies_the_table() -> None:
    assert vllm_compat.check(Tree(SMALLEST.get)) == ()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    path, words, become, said = CHANGES[change]
    files = dict(SMALLEST)
    if words is None:
        del files[path]
    else:
        assert words in files[path]
        files[path] = files[path].replace(words, become)
    lacks = vllm_compat.check(Tree(files.get))
    assert any(said in lack for lack in lacks), lacks


def test_each_kind_of_requirement_is_changed_in_these_tests() -> None:
    """A requirement that no tree can break is not checked: each breaks when its tree is empty."""
    empty = Tree({}.get)
    assert [item for item in req.REQUIREMENTS if not vllm_compat.lacks(empty, item)] == []


@pytest.mark.vllm
def test_the_installed_vllm_has_what_the_plugin_needs() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert vllm_compat.check(Tree.of_folder(Path(spec.origin).parent.parent)) == ()


def test_the_command(tmp_path: Path) -> None:
    for name, text in SMALLEST.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "vllm/__init__.py").touch()
    command = [sys.executable, str(ROOT / "tools/vllm_compat.py"), "--source"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}: ok\n"), done.stderr
    (tmp_path / "vllm/logger.py").unlink()
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, f"{tmp_path}: no module vllm.logger\n")
    done = subprocess.run([*command, str(tmp_path / "vllm")], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "holds no vllm/__init__.py" in done.stderr


def used_names(path: Path) -> Iterator[str]:
    """``vllm.logger:init_logger`` for each import from vLLM, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "vllm" for alias in node.names), (
                "import names from vLLM"
            )


def targets(items: tuple[req.Requirement, ...] = req.REQUIREMENTS) -> set[str]:
    return {
        target
        for item in items
        for target in (targets(item.options) if isinstance(item, req.OneOf) else {item.target})
    }


@pytest.mark.parametrize("path", PLUGIN, ids=lambda path: path.name)
def test_the_table_lists_what_the_plugin_imports(path: Path) -> None:
    missing = [
        name
        for name in used_names(path)
        if not any(target == name or target.startswith(f"{name}.") for target in targets())
    ]
    assert missing == [], (
        f"{path.name} imports {missing}: add what it needs of them to vllm_patch/requirements.py"
    )


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    """The methods of class ``name`` in ``path``."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
    raise AssertionError(f"no class {name} in {path}")


@pytest.mark.parametrize(
    ("file", "name", "listed"),
    [
        ("config.py", "SlideSparseConfig", req.CONFIG_METHODS),
        ("scheme.py", "SlideSparseScheme", req.SCHEME_METHODS),
    ],
)
def test_the_table_has_our_signatures(file: str, name: str, listed: dict[str, str]) -> None:
    public = {
        method: node for method, node in methods(ROOT / "vllm_patch" / file, name).items() if method[0] != "_"
    }
    found = {method: str(vllm_compat.signature(node, method=True)) for method, node in public.items()}
    assert found == listed


def test_the_table_lists_what_the_plugin_calls_of_its_bases() -> None:
    """Each ``super().method(...)`` and ``self.inner.method(...)``."""
    called = {"config.py": ("super()", "CompressedTensorsConfig"), "scheme.py": ("self.inner", "W8A8Int8")}
    listed = targets(tuple(item for item in req.REQUIREMENTS if isinstance(item, req.Call | req.Sets)))
    for file, (receiver, owner) in called.items():
        calls = {
            node.func.attr
            for node in ast.walk(ast.parse((ROOT / "vllm_patch" / file).read_text()))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == receiver
        }
        assert calls
        missing = {name for name in calls if not any(t.endswith(f"{owner}.{name}") for t in listed)}
        assert missing == set(), f"{file} calls {missing} of {owner}: add it to vllm_patch/requirements.py"


def test_the_committed_table_is_whole() -> None:
    """One row a release from VLLM_OLDEST on, in order, none broken that the plugin was run with."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert text.startswith(vllm_compat.HEAD), "run python tools/vllm_compat.py"
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    versions = [row[0].strip() for row in rows]
    assert versions == sorted(set(versions), key=Version)
    assert versions[0] == VLLM_OLDEST
    assert {row[0].strip(): row[2].strip() for row in rows if row[3].strip()} == dict.fromkeys(
        VLLM_TESTED, "ok"
    )
