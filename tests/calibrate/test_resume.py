"""Calibrated conversions that are killed and resumed, and folders that others have damaged or planted."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from calibration import DEVICES, Killed, calibrated, set_clock, write_ids
from checkpoints import convert, killed, snapshot

from slidesparse import files
from slidesparse.calibrate import distill, learning, pipeline
from slidesparse.calibrate.resume import work_folder
from slidesparse.convert import budget, stream
from slidesparse.convert.budget import Budget
from slidesparse.errors import CalibrationError, EnvironmentFault, SlideSparseError
from slidesparse.files import locked

ID_SAMPLES, TEXT_SAMPLES = 12, 40
BUDGET: dict[str, Any] = {"budget": Budget(0.3, tokens=(16,)), "epochs": 0}
EVERYTHING: dict[str, Any] = {"rotate": "on", "minutes": 36 / 60, **BUDGET}


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[list[str]]:
    """Raise Killed before the file number ``at`` of a work folder is renamed; yields the names of those before."""
    rename, names = os.rename, list[str]()

    def die(old: Path, new: Path) -> None:
        if ".calibrated" in str(new):
            names.append(Path(new).name)
            if len(names) == at:
                raise Killed
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        yield names


def run(source: Path, out: Path, ids: str, **options: Any) -> Any:
    """Convert by the clock of `set_clock`."""
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch)
        patch.setattr(distill, "SAVE_SECONDS", 5.0)
        patch.setattr(distill, "SAVE_PART", 0)
        patch.setattr(learning, "STEPS", 4)
        return calibrated(source, out, ids, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "fine-tuned": {"epochs": 1},
    "rotated, smoothed": {"rotate": "on", "epochs": 0},
    "distilled": {"minutes": 12 / 60, "epochs": 0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_resumed_run_has_the_bytes_of_an_uninterrupted_one(
    model: Path, tmp_path: Path, ids: str, text: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed before some of its saves; what was saved is not computed again."""
    options = OPTIONS[name] | ({"distill": text} if name == "distilled" else {})
    with dying(monkeypatch, 0) as saves:
        run(model, tmp_path / "whole", ids, **options)
    for point in random.Random(0).sample(range(1, len(saves) + 1), 5):
        monkeypatch.setenv("SLIDESPARSE_CACHE", str(tmp_path / f"cache{point}"))
        out = tmp_path / f"out{point}"
        with dying(monkeypatch, point) as before, pytest.raises(Killed):
            run(model, out, ids, **options)
        with dying(monkeypatch, 0) as after:
            report = run(model, out, ids, resume=True, **options)
        assert snapshot(out) == snapshot(tmp_path / "whole")
        finished = {n for n in before[:-1] if n.endswith(".safetensors") and not n.startswith("dist")}
        assert not finished & {*after}
        assert len(report.layers) == len(report.plan.patterns)
        assert report.rotation.startswith("the residual stream") == ("rotate" in options)
        assert not work_folder(out).exists()


def test_budget_is_resumed(model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run of the same model fills the cache meanwhile, with losses by which it would decide otherwise."""
    with dying(monkeypatch, 0) as saves:
        whole = run(model, tmp_path / "whole", ids, **BUDGET)
    assert saves.count("choice.json") >= 3  # at least two choices were tried
    written = {row["name"]: row["pattern"] for row in whole.layers}  # not those of a choice before
    assert written == {name: whole.plan.patterns[name].ratio for name in written}
    (cache,) = (Path(os.environ["SLIDESPARSE_CACHE"]) / "losses").glob("*.json")
    entries = files.read_json(cache)
    other = [[name, dict(zip(by, reversed(by.values()), strict=True)), *rest] for name, by, *rest in entries]
    for point in random.Random(1).sample(range(2, len(saves) + 1), 5):
        cache.unlink()
        with dying(monkeypatch, point), pytest.raises(Killed):
            run(model, tmp_path / f"out{point}", ids, **BUDGET)
        files.write_json(cache, other)
        report = run(model, tmp_path / f"out{point}", ids, resume=True, **BUDGET)
        assert report.plan.patterns == whole.plan.patterns
        assert snapshot(tmp_path / f"out{point}") == snapshot(tmp_path / "whole")


def test_budget_is_not_resumed_by_other_layer_times(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another choice would follow from them, whose patterns the weights that were distilled do not have."""
    with dying(monkeypatch, 6), pytest.raises(Killed):
        run(model, tmp_path / "out", ids, **BUDGET)
    times = tmp_path / "layer_times.csv"
    times.write_text(re.sub(r"(6:8,\d+),", r"\1,9", budget.FILE.read_text()))
    monkeypatch.setattr(budget, "FILE", times)
    with pytest.raises(CalibrationError, match=r"slidesparse's layer times changed\); repeat that command"):
        run(model, tmp_path / "out", ids, resume=True, **BUDGET)


@pytest.mark.parametrize(("good", "bad"), [("layer-00000", "state"), ("state", "layer-00000")])
def test_file_in_the_place_of_another_is_refused(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch, good: str, bad: str
) -> None:
    """Both are as they were written, but not there."""
    with dying(monkeypatch, 4), pytest.raises(Killed):
        run(model, tmp_path / "out", ids, epochs=0)
    work = work_folder(tmp_path / "out")
    shutil.copy(work / f"{good}.json", work / f"{bad}.json")
    with pytest.raises(CalibrationError, match=f"{bad}.json does not hold what was written there; remove"):
        run(model, tmp_path / "out", ids, epochs=0, resume=True)


@DEVICES
def test_killed_by_a_signal_resumes(source: Path, tmp_path: Path, ids: str, device: str) -> None:
    """Within the second block's 14 tensors."""
    options = {"seqlen": 24, "device": device, "rotate": "off", "resume": True}
    killed(source, tmp_path / "out", 20, data=[ids], **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        calibrated(source, tmp_path / "out", ids, device=device, resume=True)
        calibrated(source, tmp_path / "whole", ids, device=device)
    finally:
        torch.set_num_threads(threads)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "out", "whole"]


# What is refused


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"pattern": "4:6"}, "--sparsity was '6:8', is '4:6'"),
    ({"quant": "fp8"}, "--quant was None, is 'fp8'"),
    ({"samples": 3}, "--samples was 128, is 3"),
    ({"seqlen": 20}, "--seqlen was 24, is 20"),
    ({"rotate": "auto"}, "--rotate was 'off', is 'auto'"),
    ({"epochs": 2}, "epochs was 0, is 2"),
    ({"layer": ["o_proj=dense"]}, "--layer was [], is ['o_proj=dense']"),
    ({"ignore": ["o_proj"]}, "--ignore was [], is ['o_proj']"),
    ({"budget": Budget(0.5, tokens=(16,))}, "--max-loss was None, is {"),
    ({"minutes": 5.0}, "--minutes was 10.0, is 5.0"),
]


def test_other_options_are_refused_before_anything_is_read(
    source: Path, tmp_path: Path, ids: str, text: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the option that differs; later on, other data, and another source."""
    options: dict[str, Any] = {"epochs": 0, "distill": text}
    with dying(monkeypatch, 4), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids, **options)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "open_checkpoint", lambda *_: pytest.fail("the source was read"))
        for change, fact in CHANGES:
            with pytest.raises(CalibrationError) as error:
                calibrated(source, tmp_path / "out", ids, resume=True, **{**options, **change})
            assert fact in str(error.value)
        with pytest.raises(CalibrationError, match="with --resume"):
            calibrated(source, tmp_path / "out", ids, **options)
    with pytest.raises(CalibrationError, match="with other inputs .the text of --distill changed.; repeat"):
        calibrated(source, tmp_path / "out", ids, resume=True, epochs=0, distill=(ids,))
    with pytest.raises(CalibrationError, match="the data of --calib changed"):
        calibrated(source, tmp_path / "out", *text, resume=True, **options)


def test_a_source_is_known_by_its_weights(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was fetched again has another time; one whose weights were changed in place may have the same."""
    with dying(monkeypatch, 4), pytest.raises(Killed):
        calibrated(source, tmp_path / "out", ids, epochs=0)
    other = shutil.copytree(source, tmp_path / "other")
    weights, time = other / "model.safetensors", (source / "model.safetensors").stat().st_mtime_ns
    flip(weights, -2)
    os.utime(weights, ns=(time, time))
    with pytest.raises(CalibrationError, match=r"inputs .the weights of the source changed.; repeat"):
        calibrated(other, tmp_path / "out", ids, epochs=0, resume=True)
    flip(weights, -2)
    os.utime(weights, ns=(time + 1, time + 1))
    calibrated(other, tmp_path / "out", ids, epochs=0, resume=True)


def test_rotation_that_was_not_used_is_not_used_on_request(
    model: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--rotate auto` found that it prunes worse: blocks finished without it cannot go on with it."""
    learn = learning.learn_rotation
    losses = {learning.LOSSES: torch.tensor([1.0, 2.0])}
    monkeypatch.setattr(learning, "learn_rotation", lambda *a: {**learn(*a), **losses})
    with dying(monkeypatch, 7), pytest.raises(Killed):
        run(model, tmp_path / "out", ids, rotate="auto", epochs=0)
    assert (work_folder(tmp_path / "out") / "layer-00000.safetensors").exists()
    with pytest.raises(CalibrationError, match="--rotate was 'auto', is 'on'"):
        run(model, tmp_path / "out", ids, rotate="on", epochs=0, resume=True)
    assert run(model, tmp_path / "out", ids, rotate="auto", epochs=0, resume=True).rotation.startswith("not")


@pytest.mark.parametrize("resume", [True, False])
def test_concurrent_calibration_is_refused(source: Path, tmp_path: Path, ids: str, resume: bool) -> None:
    """Without --resume, too, nobody is told to remove the folder of a run that goes on."""
    messages: list[str] = []

    def interfere(phase: str, done: int, total: int) -> None:
        if phase == "pruning" and not messages:
            with pytest.raises(CalibrationError, match="another calibration is writing") as error:
                calibrated(source, tmp_path / "out", ids, epochs=0, resume=resume)
            messages.append(str(error.value))
            with pytest.raises(CalibrationError, match="another calibration is writing"):
                convert(source, tmp_path / "out", "6:8")  # which would take its place

    calibrated(source, tmp_path / "out", ids, epochs=0, progress=interfere)
    assert len(messages) == 1


def test_lock_of_one_that_only_looked_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it removed the folder, in whose place there may be that of a third one."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr("time.sleep", lambda _: os.close(descriptor))
    with locked(tmp_path, CalibrationError("busy")) as held:
        assert held
    for makes_another in (False, True):
        used = files.own_folder(tmp_path / "used")
        descriptor = os.open(used, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        def end(_: float, used: Path = used, held: int = descriptor, again: bool = makes_another) -> None:
            used.rmdir()
            if again:
                used.mkdir()
            os.close(held)

        monkeypatch.setattr("time.sleep", end)
        with pytest.raises(CalibrationError, match="busy"), locked(used, CalibrationError("busy")):
            pass


def test_work_of_an_interrupted_run_is_named_by_a_conversion_that_does_not_use_it(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is hidden.  Nothing is said of one without finished layers, which is removed."""
    for saves, name in ((1, "unused"), (4, "out")):
        out = tmp_path / name
        with dying(monkeypatch, saves), pytest.raises(Killed):
            calibrated(source, out, ids, epochs=0)
        before = snapshot(work_folder(out))
        report = convert(source, out, "6:8")
        assert ("\n" not in report.note, f"{work_folder(out)} holds" in report.note) == (True, name == "out")
        assert work_folder(out).exists() == (name == "out")
    assert snapshot(work_folder(out)) == before
    out.rename(tmp_path / "elsewhere")  # as the note says
    calibrated(source, out, ids, epochs=0, resume=True)


def test_run_that_fills_the_memory_is_resumed(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's allocator of a CPU, and by Python's: in the second block."""
    whole = calibrated(source, tmp_path / "whole", ids, epochs=0)
    gather = pipeline.gather_hessian
    layers = len(whole.plan.patterns) // 2

    for name, fill in {"torch": lambda: torch.empty(2**60), "python": lambda: bytearray(2**60)}.items():
        left = iter(range(layers))

        def fail(*arguments: Any, fill: Callable[[], object] = fill, left: Any = left, **more: Any) -> Any:
            return fill() if next(left, None) is None else gather(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "gather_hessian", fail)
            with pytest.raises(
                CalibrationError, match=r"memory of cpu .*where more is free, --resume continues"
            ):
                calibrated(source, tmp_path / name, ids, epochs=0)
        assert (work_folder(tmp_path / name) / "layer-00000.safetensors").exists()
        calibrated(source, tmp_path / name, ids, epochs=0, resume=True)
        assert snapshot(tmp_path / name) == snapshot(tmp_path / "whole")


def test_block_that_does_not_fit_into_a_gpu(
    source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(pipeline.Stream, "advance", Mock(side_effect=full))
    with pytest.raises(
        CalibrationError,
        match=r"CUDA out of memory.*--resume continues .*less is needed with fewer --samples",
    ):
        calibrated(source, tmp_path / "out", ids, epochs=0)


def test_folders_of_others(source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted link, another user's folder, one that others may change, and a file in its place."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    folder = work_folder(out)

    def refused(words: str, resume: bool) -> None:
        before = snapshot(tmp_path)
        with pytest.raises(EnvironmentFault, match=words):
            calibrated(source, out, ids, epochs=0, resume=resume)
        assert snapshot(tmp_path) == before

    victim.mkdir()
    folder.symlink_to(victim)
    for resume_run in (False, True):
        refused("is a link", resume_run)
    folder.unlink()
    folder.symlink_to(tmp_path / "nowhere")
    refused("cannot be created", False)
    folder.unlink()
    folder.write_text("a file")
    refused("is a link or a file", True)
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    refused("may be changed by other users", False)
    folder.chmod(0o755)
    with dying(monkeypatch, 4), pytest.raises(Killed):
        calibrated(source, out, ids, epochs=0)
    owner = os.geteuid() + 1
    monkeypatch.setattr(files.os, "geteuid", lambda: owner)
    for resume_run in (False, True):
        refused("belongs to another user", resume_run)


def flip(path: Path, at: int) -> None:
    """Change the lowest bit of a byte."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


UNREADABLE: list[Callable[[Path], object]] = [
    lambda path: flip(path, -100),
    lambda path: flip(path, -9),
    lambda path: path.write_bytes(path.read_bytes()[:-9]),
    lambda path: path.write_bytes(b""),
    lambda path: (path.unlink(), os.mkfifo(path)),
    lambda path: (path.unlink(), path.mkdir()),
    lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))),
]
WRONG: list[Callable[[Path], object]] = [
    lambda path: path.write_text(re.sub(r"\d+\.\d+", '"much"', path.read_text(), count=1)),
    *[lambda path, text=text: path.write_text(text) for text in ("9" * 5000, "[" * 10**5, "[]")],
]


@pytest.fixture(scope="module")
def interrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a work folder that has every kind of file."""
    folder = tmp_path_factory.mktemp("interrupted")
    ids, text = write_ids(folder / "ids.npy", ID_SAMPLES), write_ids(folder / "text.npy", TEXT_SAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "write_output", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            run(model, folder / "out", ids, distill=(text,), **EVERYTHING)
    return folder


FILES = "choice.json distilled.safetensors distilling.safetensors layer-00000.json layer-00000.safetensors losses.json "
FILES += "rotation.safetensors smoothing.safetensors state.json"


@pytest.mark.parametrize("name", FILES.split())
def test_damaged_work_is_refused_by_name(model: Path, interrupted: Path, tmp_path: Path, name: str) -> None:
    """In one line, and never in torch's words, also where a bit of a value changed; nothing is published."""
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    folder, text = work_folder(tmp_path / "out"), (str(tmp_path / "text.npy"),)
    assert {path.name for path in folder.iterdir()} >= {*FILES.split()}
    for damage in [*UNREADABLE, *(WRONG if name.endswith("json") else ())]:
        shutil.rmtree(folder)
        shutil.copytree(work_folder(interrupted / "out"), folder)
        damage(folder / name)
        with pytest.raises(SlideSparseError) as error:
            run(model, tmp_path / "out", str(tmp_path / "ids.npy"), distill=text, resume=True, **EVERYTHING)
        assert f"{folder / name} " in str(error.value)
        assert str(error.value).endswith(f"; remove {folder} to start over")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_missing_work_is_done_again_or_refused(model: Path, interrupted: Path, tmp_path: Path) -> None:
    """Without choice.json the first choice is tried again, whose patterns the finished blocks may not have."""
    ids, options = str(interrupted / "ids.npy"), {"distill": (str(interrupted / "text.npy"),), **EVERYTHING}
    again = ("layer-00000.json", "layer-00001.safetensors", "rotation.safetensors", "choice.json")
    for name in ("nothing", *again, "state.json", "distilled.safetensors"):
        folder = shutil.copytree(interrupted, tmp_path / name)
        if name != "nothing":
            (work_folder(folder / "out") / name).unlink()
        if name in ("nothing", *again):
            run(model, folder / "out", ids, resume=True, **options)
            assert snapshot(folder / "out") == snapshot(tmp_path / "nothing" / "out")
        else:
            with pytest.raises(CalibrationError, match="to start over"):
                run(model, folder / "out", ids, resume=True, **options)


def test_full_disk(source: Path, tmp_path: Path, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a full disk names --resume, which asks for no more room than is left."""
    with monkeypatch.context() as patch:
        patch.setattr(stream, "publish", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(EnvironmentFault, match="with --resume"):
            calibrated(source, tmp_path / "out", ids, epochs=0)
    monkeypatch.setattr(stream, "require_space", lambda *_: pytest.fail("asked for room again"))
    calibrated(source, tmp_path / "out", ids, epochs=0, resume=True)
