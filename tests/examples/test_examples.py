"""Each example runs, keeps its promise, and writes its picture and nothing else."""

import datetime as dt
import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, arguments: list[str], out: Path) -> dict[str, float]:
    """Run an example's main() and return what it measured."""
    module = load(name)
    found: dict[str, float] = module.main([*arguments, "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    return found


def test_kernel_pooling_finds_the_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("kernel_pooling", ["--quick"], tmp_path / "pooling.png")
    assert found["bandwidth"] == pytest.approx(found["grid"], rel=0.25)  # it started at 0.5, six times too wide
    assert found["last"] < 1.02 * found["best"]
    assert found["last"] < 0.6 * found["first"]
    assert found["learned"] < 0.75 * found["fixed"]  # the distance to the truth, which training never saw
    assert "bandwidth        0.500 -> " in capsys.readouterr().out


def test_kernel_regression_says_whom_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="the data and the estimator are scikit-learn's")
    found = run("kernel_regression", ["--quick"], tmp_path / "regression.png")
    assert found["kernel"] > 0.4
    assert abs(found["kernel"] - found["linear"]) < 0.1
    assert 10 < found["rest"] < 442
    assert 5 / 442 < found["weight"] < 1.0
    assert "R², cross-validated: linear 0.4" in capsys.readouterr().out


def test_a_recorded_model_is_read_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    found = run("record_a_model", ["--tokens", "4"], tmp_path / "heads.png")
    assert found["layers"] == 4
    assert found["queries"] == 603  # 600 read and 4 written, the last of which was not read again
    assert found["previous"] > 0.9
    assert found["induction"] > 0.3
    assert 0.5 < found["on_prompt"] < 1.0
    assert found["error"] < 1e-5
    assert "previous token 0.9" in capsys.readouterr().out


def test_without_induction_heads_a_model_copies_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    found = run("induction_heads", ["--draws", "3"], tmp_path / "induction.png")
    assert found["plain"] < 5.0
    assert found["without"] > found["plain"] + 6.0  # nearly that of tokens that occur for the first time
    assert found["worst"] < found["plain"] + 3.0
    assert found["control"] < found["plain"] + 2.0
    assert "and head 2.4" in capsys.readouterr().out


def test_a_query_learns_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("where_it_looks", ["--steps", "60"], tmp_path / "look.png")
    assert found["before"] < 0.05  # 1 of 144 patches
    assert found["after"] > 0.5
    assert found["right"] > 0.9
    assert "weight on the square" in capsys.readouterr().out


@pytest.mark.slow
def test_date_translation_is_right_on_held_out_dates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seconds", "300", "--steps", "70", "--rate", "0.016", "--guide", "0.3", "--checked", "400"]
    found = run("date_translation", options, tmp_path / "dates.png")
    assert found["accuracy"] > 0.95
    assert found["aligned"] > 0.8  # 0.52 without guidance, even after 130 steps
    assert "right to the last letter" in capsys.readouterr().out


@pytest.mark.slow
def test_gpt2_learns_more_than_pairs_of_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("attlas.nn", reason="the layers are in attlas.nn")
    found = run("train_gpt2", ["--seconds", "300", "--steps", "200"], tmp_path / "heads.png")
    assert found["loss"] < found["baseline"]  # nobody who looks back one letter only can do that
    assert found["written"] > 60
    assert "bigram model" in capsys.readouterr().out


def test_entropy_that_is_kept_up_lets_attention_learn() -> None:
    found = load("keep_entropy").main([])
    assert found["error with"] < 0.25 * found["error without"]
    assert found["entropy with"] > found["entropy without"] + 0.5


def test_two_heads_learn_from_eight() -> None:
    found = load("distill_heads").main(["--steps", "60", "--tokens", "48"])
    assert found["last"] < 0.7 * found["first"]


def test_guidance_looks_at_the_words() -> None:
    pytest.importorskip("diffusers", reason="the model is one of diffusers")
    found = load("guide_diffusion").main([])
    assert found["cells"] == 64 * 64 * 77
    assert found["after"] < found["before"]


def test_letters_come_from_letters() -> None:
    module = load("date_translation")
    for date, own in ((dt.date(2019, 6, 3), "2019-06-03"), (dt.date(1987, 11, 24), "1987-11-24")):
        for style in range(8):
            text, spans = module.written(date, style), module.sources(date, style)
            found = [text[span.start : span.stop] for span in spans]
            assert "".join(found[:4]) == own[:4]
            assert found[4] == found[7] == ""
            name = module.MONTHS[date.month - 1]
            month = [own[5].lstrip("0") or own[6], own[6]] if style == 6 else list(own[5:7])
            assert found[5:7] == (month if style > 5 else [name if name in text else name[:3]] * 2)
            assert found[8:] == (list(own[8:]) if style == 7 else [own[8].lstrip("0") or own[9], own[9]])
