"""Wrong uses from Python, and what each message must hold: found, expected, what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from packaging.requirements import Requirement

from jax_impl.acceptance_config import Acceptance
from jax_impl.backend import BackendUnavailableError, choose_backend
from jax_impl.checkpoint import Checkpoint, CheckpointError
from jax_impl.config import ConfigError, ModelConfig, RunConfig
from jax_impl.engine import Engine, EngineError
from jax_impl.ids import parse_ids
from jax_impl.loader import load_weights
from jax_impl.make_tiny import make_checkpoint
from jax_impl.memory import DoesNotFitError, MemorySettings, require_room
from jax_impl.processes import ProcessError, ProcessOptions, find_processes
from jax_impl.sharding import place_ranks, require_ranks
from pallas_kernels import common
from parity.wrong_uses import Wrong, lacking

ROOT = Path(__file__).parents[1]
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.1"}
RUN = RunConfig(slots=2, pages=3, page_size=4)
CONFIG = {"text_config": {}, "model_type": "llama"}


class Case(NamedTuple):
    """One wrong use: `use` gets an engine; the texts are parts of its message."""

    use: Callable[[Engine], Any]
    error: type[Exception]
    found: str
    expected: str
    do: str


def _config(engine: Engine) -> ModelConfig:
    return engine.static.config


def _long(engine: Engine) -> None:
    engine.prefill(engine.add(list(range(1, 14))))


def _many(engine: Engine) -> None:
    engine.prefill(engine.add(list(range(1, 10))))


def _finished(engine: Engine) -> None:
    handle = engine.add([5], limit=1)
    engine.sequences[handle].finished = "limit"
    engine.decode([handle])


def _no_slot(engine: Engine) -> None:
    for _ in range(3):
        engine.add([5])


CASES = {
    "no ids": Case(
        lambda e: e.add([]), EngineError, "no token ids", "at least one id", "tokenizer"
    ),
    "ids outside": Case(
        lambda e: e.add([5, 384, -1]), EngineError, "[384, -1]", "0..383", "tokenizer"
    ),
    "words for ids": Case(
        lambda e: e.add(["a"]), EngineError, "['a']", "0..383", "this model's tokenizer"
    ),
    "temperature": Case(
        lambda e: e.add([5], temperature=-1), EngineError, "-1", "0 (greedy)", "Change these"
    ),
    "filters": Case(
        lambda e: e.add([5], temperature=1, top_k=-1, top_p=0, min_p=2), EngineError,
        "top_k -1: expected 0 (off)", "top_p 0: expected more than 0", "Change these",
    ),
    "filters at temperature 0": Case(
        lambda e: e.add([5], top_k=3), EngineError, "top_k 3", "temperature above 0", "Change these"
    ),
    "filters of an engine without": Case(
        lambda e: e.add([5], temperature=1, min_p=0.1), EngineError,
        "min_p: expected none", "this engine was made without", "make it with filters=True",
    ),
    "seed": Case(
        lambda e: e.add([5], seed=-1), EngineError, "seed -1", "expected 0..4294967295", "Change"
    ),
    "limit": Case(
        lambda e: e.add([5], limit=0), EngineError, "limit 0", "at least 1 token", "Change these"
    ),
    "slots": Case(_no_slot, EngineError, "all 2 slots", "a free one", "raise slots"),
    "context beyond the cache": Case(
        _long, EngineError, "13 tokens", "the context of 12", "a larger context"
    ),
    "context of an engine": Case(
        lambda e: Engine(_config(e), RUN, e.weights, context=13),
        EngineError, "context 13", "expected 1..12 tokens", "make more pages",
    ),
    "pages": Case(
        lambda e: (e._free_pages.clear(), _many(e)),
        EngineError, "need 3 more page(s)", "0 of 3 are free", "raise pages",
    ),
    "not prefilled": Case(
        lambda e: e.decode([e.add([5, 6])]), EngineError, "2 unprocessed", "exactly one", "prefill"
    ),
    "more rows than the largest batch": Case(
        lambda e: e.decode([]), EngineError, "0 sequences", "1..64 different", "split the batch"
    ),
    "unknown handle": Case(
        lambda e: e.decode([7]), EngineError, "no sequence 7", "expected one of []", "`add`"
    ),
    "finished": Case(
        _finished, EngineError, "is finished (limit)", "extend", "release it"
    ),
    "run settings": Case(
        lambda e: RunConfig(profile="X", slots=0, kv_dtype="int4", commit="no"),  # type: ignore[arg-type]
        ConfigError, "slots: found 0", "expected one of ('H', 'V')", "Change these",
    ),
    "mla_norm_eps": Case(
        lambda e: RunConfig(mla_norm_eps=-1.0), ConfigError, "-1.0", "a positive number", "Change"
    ),
    "another model": Case(
        lambda e: ModelConfig.from_dict(CONFIG), ConfigError, "'llama'", "'kimi_k3'", "Give the"
    ),
    "no object": Case(
        lambda e: ModelConfig.from_dict([]), ConfigError, "found list", "a JSON object", "Fetch"  # type: ignore[arg-type]
    ),
    "checkpoint": Case(
        lambda e: Checkpoint.open("nowhere"),
        CheckpointError, "nowhere", "a checkpoint directory", "config.json",
    ),
    "preset": Case(
        lambda e: make_checkpoint("out", "huge"), ValueError, "'huge'", "tiny, synthetic", "choose"
    ),
    "shards": Case(
        lambda e: make_checkpoint("out", shards=0), ValueError, "0", "1 to 716", "choose"
    ),
    "memory settings": Case(
        lambda e: MemorySettings(ranks=0, batch=0), ConfigError, "found 0", "integer >= 1", "Change"
    ),
    "room": Case(
        lambda e: require_room(_config(e), 1000, RUN),
        DoesNotFitError, "0.00 GB (1,000 bytes) are free", "weights need", "Use more ranks",
    ),
    "ranks": Case(
        lambda e: require_ranks(_config(e), RUN, 5),
        ConfigError, "6 does not divide by 5", "divides all of it", ": 1, 2.",
    ),
    "devices": Case(
        lambda e: place_ranks(1000), ConfigError, "1 device(s)", "one device per", "emulate 1000"
    ),
    "acceptance length": Case(
        lambda e: Acceptance("synthetic", length=0.5).require(3),
        ConfigError, "found 0.5", "expected 1..4", "Change these",
    ),
    "acceptance rates": Case(
        lambda e: Acceptance("synthetic", rates=(0.5, 0.9)).require(2),
        ConfigError, "(0.5, 0.9)", "not rising", "Change these",
    ),
    "acceptance rule": Case(
        lambda e: Acceptance("coin", length=2).require(9),  # type: ignore[arg-type]
        ConfigError, "'coin'", "expected 1..7", "Change these",
    ),
    "token ids": Case(
        lambda e: parse_ids("1,-2"), ValueError, "-2", "non-negative integers", "correct it"
    ),
    "slurm": Case(
        lambda e: find_processes(
            ProcessOptions(), {"SLURM_STEP_NODELIST": "[", "SLURM_PROCID": "x"}
        ),
        ProcessError, "SLURM_PROCID: found 'x'", "expected host names", "multi_process.md",
    ),
    "backend": Case(
        lambda e: choose_backend(RunConfig(decode_backend="latency_specialized")),
        BackendUnavailableError, "devices found: cpu", "an NVIDIA GPU", "Use decode_backend 'auto'",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "tiny"
    make_checkpoint(folder, "tiny", 0)
    checkpoint = Checkpoint.open(folder / "target")
    return checkpoint.config, load_weights(checkpoint)


@pytest.mark.parametrize("name", CASES)
def test_message(name, loaded, tmp_path, monkeypatch):
    if name in ("backend", "devices") and jax.default_backend() != "cpu":
        pytest.skip("what it refuses for want of a GPU, or of a second device, is here")
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    with pytest.raises(case.error) as raised:
        case.use(Engine(loaded[0], RUN, loaded[1]))
    message = str(raised.value)
    assert not lacking(message, Wrong("", case.found, case.expected, case.do)), message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("version", "taken"),
    [((0, 10, 0), False), ((0, 11, 1), False), ((0, 11, 2), True), ((0, 12, 0), True)],
)
def test_versions_of_jax(version, taken, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    if taken:
        assert not [r for r in common.unmet_conditions() if "JAX" in r]
        return
    with pytest.raises(BackendUnavailableError) as raised:
        choose_backend(RunConfig(decode_backend="latency_specialized"))
    message = str(raised.value)
    assert f"JAX {jax.__version__} found, kernels need 0.11.2" in message
    assert "Use decode_backend 'auto'" in message


def test_the_extra_cuda_brings_the_jax_that_kernels_have_run_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(r) for r in extras["optional-dependencies"]["cuda"]]
    (wanted,) = (r for r in found if r.marker is None or r.marker.evaluate(PYTHON))
    for version, taken in (((0, 11, 1), False), (common.MINIMUM_JAX, True), ((0, 12, 0), False)):
        assert wanted.specifier.contains(".".join(map(str, version))) == taken


def test_pages_say_which_jax_kernels_need():
    for page in ("README.md", "docs/measure.md", "docs/load_released.md"):
        assert "JAX >= 0.11.2" in " ".join((ROOT / page).read_text().split()), page
    assert common.MINIMUM_JAX == (0, 11, 2), "the pages differ"


def test_a_long_list_of_ids_is_no_file_name(tmp_path):
    ids = list(range(3, 2000))
    assert parse_ids(",".join(map(str, ids))) == ids == parse_ids(str(ids))
    file = tmp_path / "1,2"  # a name that looks like a list
    file.write_text("7 8")
    assert parse_ids(str(file)) == [7, 8]


@pytest.mark.parametrize("text", ["1_0,2", "1,,2", ",1", "1,", "1,٣", "٣,4", "²", "1,+5", "0x10"])
def test_what_is_no_plain_number_is_no_token_id(text, tmp_path):
    file = tmp_path / "ids"
    file.write_text(text)
    for given in (text, str(file)):
        with pytest.raises(ValueError, match=r"found .*expected (whole numbers|an existing file)"):
            parse_ids(given)


def test_commas_and_blanks_may_stand_between_ids(tmp_path):
    assert parse_ids("1, 2 ,3 4\n") == [1, 2, 3, 4] == parse_ids(" 1\t2\n3  4")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ValueError, match="non-empty"):
        parse_ids(str(tmp_path / "empty"))
