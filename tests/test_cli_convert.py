"""``slidesparse convert`` with calibration, as a user meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from calibration import write_ids
from checkpoints import DOWN, LLAMA, Q, config_of, llama, snapshot
from test_cli import Done

from slidesparse import cli_convert
from slidesparse import convert as converting


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "source")


@pytest.fixture
def calib(tmp_path: Path) -> tuple[object, ...]:
    return ("--calib", write_ids(tmp_path / "ids.npy"), "--seqlen", 24, "--device", "cpu")


def test_sparsegpt_is_the_default_with_calibration(
    source: Path, tmp_path: Path, calib: tuple[object, ...]
) -> None:
    report = tmp_path / "report.json"
    options = ("--layer", "down_proj=8:10", "--skip", "1.*o_proj", "--report", report)
    done = Done("convert", source, tmp_path / "out", "-s", "6:8", *calib, *options)
    assert done.code == 0, done.err
    assert done.err == "note: ids.npy gives 6 samples of at most 24 tokens, 128 were asked for\n"
    lines = done.out.splitlines()
    assert lines[:6] == [
        "pattern   6:8 (2 of every 8 pruned); as a flag, SPARSITY=2_8",
        "layers    13 in int8 W8A8, dense layout",
        "          2 of them at 8:10",
        "method    sparsegpt, calibrated with ids.npy, 6 samples, 144 tokens",
        "skipped   1 quantized, not pruned (--skip): model.layers.1.self_attn.o_proj",
        "kept      1 as in the source (not a linear layer of a block): lm_head",
    ]
    assert [line.split()[0] for line in lines[6:]] == ["error"] * 5 + ["bytes", "serve"]
    found = json.loads(report.read_text())
    assert lines[6].endswith(f"{found['sensitivity'][0]}  (the largest)")
    assert (found["method"], found["violations"], found["dead_columns"]) == ("sparsegpt", 0, 0)
    assert (found["pattern"], found["quant"], found["layout"]) == ("6:8", "int8", "dense")
    assert found["skipped"] == {"model.layers.1.self_attn.o_proj": "--skip"}
    rows = {row["name"]: row for row in found["layers"]}
    assert sorted(rows) == sorted(config_of(tmp_path / "out")["quantization_config"]["slidesparse"]["layers"])
    assert (rows[DOWN]["pattern"], rows[Q]["pattern"]) == ("8:10", "6:8")
    assert set(rows[Q]) == {
        "name", "pattern", "out_features", "in_features", "zeros", "violations", "dead_columns", "scale_min",
        "scale_max", "method", "error_pruned", "error_quantized", "error_finetuned", "block_error",
        "block_error_finetuned", "tokens", "seconds",
    }  # fmt: skip
    ranked = [rows[name]["error_finetuned"] for name in found["sensitivity"]]
    assert ranked == sorted(ranked, reverse=True)
    assert len(ranked) == 13


def test_options_reach_the_calibration(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    plain = converting.convert

    def record(*arguments: Any, **options: Any) -> Any:
        seen.update(options)
        return plain(*arguments, **options)

    monkeypatch.setattr(converting, "convert", record)
    options = (
        "--calib",
        "random",
        "--samples",
        3,
        "--seqlen",
        9,
        "--device",
        "cpu",
        "--sweeps",
        1,
        "--resume",
    )
    more = ("--method", "sparsegpt", "--skip-worst", "10%", "--seed", 4, "--dry-run")
    done = Done("convert", source, tmp_path / "out", "-s", "6:8", *options, *more)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == "dry run   nothing was written"
    assert "for trying things out only" in done.err
    how = seen["calibration"]
    assert (how.data, how.samples, how.seqlen, how.device, how.sweeps, how.resume) == (
        "random",
        3,
        9,
        "cpu",
        1,
        True,
    )
    assert (seen["method"], seen["skip_worst"], seen["seed"]) == ("sparsegpt", "10%", 4)
    assert not (tmp_path / "out").exists()


def test_interrupted_then_resumed(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slidesparse.calibrate.work import Work

    publish = Work.publish

    def interrupt(self: Work, number: int, *rest: Any) -> None:
        if number:
            raise KeyboardInterrupt
        publish(self, number, *rest)

    command = ("convert", source, tmp_path / "out", "-s", "6:8", *calib)
    with monkeypatch.context() as patch:
        patch.setattr(Work, "publish", interrupt)
        done = Done(*command)
    assert done.code == 130
    assert "interrupted; --resume goes on from the layers that are finished" in done.err
    refused = Done(*command)
    assert refused.code == 2
    assert "--resume goes on from them" in refused.err
    assert Done(*command, "--resume").code == 0
    assert Done("convert", source, tmp_path / "whole", "-s", "6:8", *calib).code == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "sparsegpt"), "--method sparsegpt needs calibration data"),
        (("--resume",), "without --calib nothing is calibrated, so --resume would do nothing"),
        (("--samples", "9", "--finetune", "2"), "so --samples and --finetune would do nothing: give --calib"),
        (
            ("--calib", "random", "--method", "wanda", "--sweeps", "9"),
            "--method wanda has no use for --sweeps",
        ),
        (("--report", "/proc/report.json"), "--report /proc/report.json: "),
        (("--calib", "missing.jsonl"), "--calib 'missing.jsonl' is no file"),
        (("--calib", "random", "--skip-worst", "all"), "is not a percentage"),
        (("--layer", "down_proj=1:8"), "--layer 'down_proj=1:8': sparsity '1:8' prunes 7"),
        (("--report", "missing/report.json"), "name a file in one that is"),
    ],
)
def test_usage_exits_2(source: Path, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = Done("convert", source, tmp_path / "out", "-s", "6:8", *options)
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "out").exists()


def test_a_missing_tokenizer_library_exits_3(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calib.jsonl").write_text('"some text"\n')
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    done = Done("convert", source, tmp_path / "out", "-s", "6:8", "--calib", tmp_path / "calib.jsonl")
    assert done.code == 3
    assert "pip install tokenizers, or give token ids instead of texts: ids.npy" in done.err


def test_a_report_without_calibration(source: Path, tmp_path: Path) -> None:
    done = Done("convert", source, tmp_path / "out", "-s", "6:8", "--report", tmp_path / "report.json")
    assert done.code == 0
    assert done.err.startswith("warning: pruned by magnitude, without calibration data")
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["error_pruned"] for row in found["layers"]] == [None] * len(LLAMA.linears())
    assert found["sensitivity"] == []
    done = Done("convert", tmp_path / "out", tmp_path / "slided", "-s", "6:8", "--layout", "slided")
    assert (done.code, done.err) == (0, "")  # nothing is pruned there, so nothing is warned of


def test_a_log_tells_how_far_a_long_calibration_is(
    source: Path, tmp_path: Path, calib: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_convert, "LINE_SECONDS", 0.0)
    done = Done("convert", source, tmp_path / "out", "-s", "6:8", *calib, "--skip-worst", "5%")
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if line.startswith(("ranking", "pruning"))]
    found = [re.fullmatch(r"(\w+) (\d+)% in \d+ s, about \d+ s left", line) for line in said]
    assert all(found), said
    assert [(m[1], 50 <= int(m[2]) < 100) for m in found if m] == [("ranking", True), ("pruning", True)]
