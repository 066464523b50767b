"""Wrong uses of `k3` and `python -m parity`, and what each message must hold."""

from __future__ import annotations

import errno
import os

import pytest

from jax_impl import cli
from jax_impl import problems as system
from parity import __main__ as parity_command
from parity.commands import RECORDED
from parity.wrong_uses import Wrong, lacking, make_workspace, plain, problems, status_of

GEN = "generate tiny/target --prompt-ids 5"
DRAFT = f"{GEN} --draft tiny/draft --drafts 3"
PRINTED = "For full helptext"
FETCH, HELP = "Fetch the named files again", "k3 generate --help` has all options"
WRONG = "--url http://127.0.0.1:9 --model m"
K3 = (
    # paths
    Wrong("check nowhere", "nowhere: not a directory", "a checkpoint directory", "config.json"),
    Wrong("check file", "file: not a directory", "a checkpoint directory", "config.json"),
    Wrong("check empty", "config.json: not found", "of a Kimi K3 checkpoint", "give the directory"),
    Wrong("check tiny", "not found", "config.json of a Kimi K3", "found one in: draft, target"),
    Wrong("check tiny/target --json full", "full is a directory", "name of a file", "choose"),
    Wrong("check tiny/target --json file/x", "file is a file", "expected a directory", "choose"),
    Wrong("convert tiny/target full", "holds other files", "an empty directory", "choose another"),
    Wrong("convert tiny/target file", "file: a file", "expected a directory", "choose another"),
    Wrong("convert tiny/target /dev/null/x", "Not a directory", "room for a", "Choose another"),
    Wrong("convert prepared out", "did not finish", "manifest.json", "Run `k3 convert tiny/target"),
    Wrong("make-tiny full", "not empty", "absent or empty directory", "choose another place"),
    Wrong("make-tiny /proc/x", "found /proc, where no", "expected a place", "choose another"),
    Wrong("make-tiny tiny/target/new", "inside", "outside of checkpoints", "choose another place"),
    Wrong("convert tiny/target tiny/target/new", "inside", "a place outside of checkpoints",
          "Choose another place"),
    Wrong("check tiny/target --json tiny/target/config.json", "tiny/target, which is input",
          "a place outside of checkpoints", "choose another place"),
    Wrong("convert tiny/target out --json tiny/draft/new/x", "tiny/draft, which is input",
          "a place outside of checkpoints", "choose another place"),
    Wrong("memory alone.json --json alone.json", "the configuration of a model",
          "a place outside of checkpoints", "choose another place"),
    Wrong("make-tiny /dev/null/x", "no directory can be made", "expected a place", "choose"),
    Wrong("memory nowhere", "config.json: not found", "of a Kimi K3", "give the directory"),
    Wrong(f"{GEN} --draft nowhere", "not found", "of a DSpark draft", "give the directory"),
    # checkpoints
    Wrong("check half", "damaged or cut short", "header and size do not agree", FETCH),
    Wrong("check without_shard", "2 of 3 shards found", "missing model-00001", "fetch the missing"),
    Wrong("check without_index", "no model.safetensors.index",
          "no model.safetensors", "fetch the index too"),
    Wrong("check broken_index", "not an index", "with a weight_map", "Fetch the file again"),
    Wrong("check broken_config", "not readable as JSON", "Expected the config.json", "fetch the"),
    Wrong("check unnamed", "not in the index", "missing, expected float32", FETCH),
    Wrong("check other_shape", "dtype float32", "expected [192, 1, 4]", FETCH),
    Wrong("convert not_finite out", "1 value(s) that are NaN", "expected finite", "fetch it again",
          leaves="out"),
    Wrong("generate not_finite --prompt-ids 1", "first at [3]", "finite numbers", "fetch it again"),
    Wrong("check old", "format 'k3-prepared/0'", "expected 'k3-prepared/1'", "with this version"),
    Wrong("check tiny/target --checksums", "no checksums", "a prepared one", "Leave out"),
    # configurations
    Wrong("check silu", "found 'silu'", "only 'situ' is implemented", "as it was released"),
    Wrong("check three_settings", "rms_norm_eps: expected a number (float, below 2^31), found "
          "nothing", "only 'situ' is implemented", "as it was released"),
    Wrong("check other_model", "'llama'", "expected 'kimi_k3'", "Give the directory of a Kimi K3"),
    Wrong("memory tiny/draft", "'k3_dspark'", "expected 'kimi_linear'", "a draft goes to --draft"),
    Wrong(f"{GEN} --draft tiny/target", "'kimi_k3'", "expected 'k3_dspark'", "DSpark drafter"),
    Wrong(f"{GEN} --draft other_draft", "draft 9", "the target's 8", "made for this target"),
    Wrong(f"{GEN} --draft short_draft", "41 tokens", "limit is 16", "ask for fewer"),
    # ranks, devices, processes, memory
    Wrong("memory tiny/target --tp 7", "6 does not divide by 7", "divides all of it", ": 1, 2."),
    Wrong(f"{GEN} --tp 3", "4 does not divide by 3", "divides all of it", ": 1, 2."),
    Wrong(f"{GEN} --tp 0", "--tp 0", "at least 1", "change it"),
    Wrong(f"{GEN} --tp 2", "1 device(s)", "one device per rank", "emulate 2 devices"),
    Wrong(f"{GEN} --dcp 3", "--dcp 3:", "expected 1 or the number of ranks", "Choose"),
    Wrong(f"{GEN} --backend latency_specialized", "devices found: cpu", "an NVIDIA GPU", "'auto'"),
    Wrong(f"{GEN} --coordinator x", "found --coordinator", "give all three", "multi_process.md"),
    Wrong(f"{GEN} --coordinator x --num-processes 2 --process-id 2", "--process-id: found 2",
          "expected HOST:PORT with a port of 1..65534", "multi_process.md"),
    Wrong(f"{GEN} --coordinator h:65535 --num-processes 0 --process-id 0", "'h:65535'",
          "expected at least 1", "multi_process.md"),
    Wrong(f"{GEN} --local-devices 3", "found 1 cpu", "--local-devices 3", "leave the option out"),
    Wrong("memory tiny/target --tp 2 --device-gb 1", "needs 4.30 GB", "a device has 1.00 GB",
          "The weights need more ranks or larger devices"),
    Wrong("memory tiny/target --tp 0 --batch 0 --drafts 8 --device-gb -1", "--drafts 8",
          "--device-gb -1.0: expected more than 0", "k3 memory --help"),
    Wrong("memory tiny/target --tp 2 --context 5000", "--context: found 5,000", "at most 4,096",
          "ask for"),
    Wrong("selftest --tp 0 --rows 65 --context 1 --seed -1", "--rows: found [65], expected numbers",
          "--seed -1: expected 0 to 4294967295", "k3 selftest --help"),
    Wrong("selftest --preset tiny --tp 1", "devices found: cpu", "an NVIDIA GPU", "'auto'"),
    Wrong("selftest --rows 1,x", "found '1,x'", "expected whole numbers with commas", "correct it"),
    # requests
    Wrong("generate tiny/target --prompt-ids 1,x", "'x'", "expected whole numbers", "tokenized"),
    Wrong("generate tiny/target --prompt-ids no.txt", "'no.txt'", "an existing file", "give the"),
    Wrong("generate tiny/target --prompt-ids nested.json", "[1, [2]]", "flat list", "correct it"),
    Wrong("generate tiny/target --prompt-ids 384", "[384]", "0..383", "model's tokenizer"),
    Wrong("generate nowhere --prompt-ids x --steps 0 --page-size 0 --draft empty",
          "nowhere: not a directory. Expected a checkpoint directory", "--page-size: found 0, expe",
          HELP),
    Wrong("generate tiny/target --prompt-ids 1,x --steps 0 --tp 3", "--prompt-ids: the list: not",
          "--steps 0: expected at least 1", "does not divide by 3"),
    Wrong("generate tiny/draft --prompt-ids 1 --draft tiny/target --steps 0",
          "found a drafter in tiny/draft", "--steps 0: expected", "exchange the two"),
    Wrong("memory tiny/draft --draft tiny/target --tp 0", "found a drafter in tiny/draft",
          "--tp 0: expected at least 1", "exchange the two"),
    Wrong("memory nowhere --batch 0", "config.json: not found", "--batch 0: expected", "--help"),
    Wrong("generate tiny/target --prompt-ids ''", "no token ids", "FILE or a list", "give"),
    Wrong(f"{GEN} --steps 9999", "10000 tokens", "the model limit is 4096", "ask for fewer"),
    Wrong(f"{GEN} --steps 0 --chunk 0 --seed -1 --page-size 0", "--page-size: found 0",
          "--seed -1: expected 0..4294967295", HELP),
    Wrong(f"{GEN} --temperature nan", "temperature nan", "expected 0 (greedy)", HELP),
    Wrong(f"{GEN} --temperature 1 --top-k -1 --top-p 0 --min-p nan", "--top-k -1: expected 0 (off)",
          "--min-p nan: expected 0 (off) to 1", HELP),
    Wrong(f"{GEN} --top-p 0.9", "--top-p 0.9", "expected --temperature above 0", HELP),
    Wrong(f"{GEN} --kv-dtype float8_e4m3fn", "--kv-scale: found None", "positive scale", HELP),
    Wrong(f"{GEN} --tp 2 --dcp 2 --profile H", "found 2 with --profile", "expected --profile 'V'",
          "or --dcp 1", HELP),
    Wrong(f"{GEN} --drafts 3 --accept block", "--accept block", "only with --draft", HELP),
    Wrong(f"{GEN} --commit snapshots --accept-rates 1", "--commit snapshots: only with --draft",
          "--accept-rates 1: only with --draft; expected a drafter", HELP),
    Wrong(f"{GEN} --draft tiny/draft --drafts 8", "--drafts: found 8", "expected 1..7", HELP),
    Wrong(f"{DRAFT} --accept synthetic", "--accept 'synthetic': found neither",
          "expected --accept-length or --accept-rates", HELP),
    Wrong(f"{DRAFT} --accept synthetic --accept-length 2 --accept-rates 1,1,0",
          "--accept 'synthetic': found --accept-length and --accept-rates",
          "expected --accept-length or --accept-rates", HELP),
    Wrong(f"{DRAFT} --accept synthetic --accept-length 4.5", "--accept-length: found 4.5",
          "expected 1..4 tokens", HELP),
    Wrong(f"{DRAFT} --accept synthetic --accept-rates 0.9,0.8", "--accept-rates: found (0.9, 0.8)",
          "expected 3 numbers within 0..1, one for each draft, not rising", HELP),
    Wrong(f"{DRAFT} --accept synthetic --accept-rates 0.5,0.6,0.1", "found (0.5, 0.6, 0.1)",
          "not rising", HELP),
    Wrong(f"{DRAFT} --accept synthetic --accept-rates 1,nan,0", "found 'nan' in '1,nan,0'",
          "expected decimal numbers with commas between", HELP),
    Wrong(f"{DRAFT} --accept block --accept-rates 1,1,0 --steps 0", "found with --accept 'block'",
          "expected --accept 'synthetic'", HELP),
    # names
    Wrong("chek tiny", "options: chek", "check, memory, convert", f"{PRINTED}, run k3 --help"),
    Wrong("check tiny/target --checksum", "--checksum", "you meant: --checksums", PRINTED),
    Wrong("make-tiny out --preset huge", "'huge'", "Expected one of ('tiny'", PRINTED),
    Wrong("make-tiny out --seed x", "'x'", "int()", PRINTED),
    Wrong("make-tiny out --seed -1", "seed -1", "expected 0..4294967295", "choose one of these"),
    Wrong(f"make-tiny out --seed {2**64}", f"seed {2**64}", "expected 0..4294967295", "choose one"),
    Wrong("generate tiny/target --prompt-ids 1_0,2", "'1_0'", "expected whole numbers",
          "tokenized"),
    Wrong("generate tiny/target --prompt-ids 1,,2", "found nothing", "expected whole numbers",
          "tokenized"),
    Wrong("check outside", "tie_word_embeddings (beside text_config): found True", "expected False",
          "as it was released"),
    Wrong("generate tiny/target", "Missing from k3 generate", "--prompt-ids STR", PRINTED),
)  # fmt: skip
PARITY = (
    Wrong("run --suite ops,vibes", "found vibes", "expected some of ops, model", "separate"),
    Wrong("run --suite ops,vibes --tp 2 --case x", "found vibes", "expected --suite sharded",
          "separate them by commas"),
    Wrong("run --suite sharded,vibes --tp 3 --case nothing", "found vibes", "'nothing', which no",
          "does not divide by 3"),
    Wrong("run --suite ops --tp 2", "--suite ops", "expected --suite sharded", "leave them out"),
    Wrong("run --suite sharded --tp 3", "does not divide by 3", "divides all of it", "Choose a"),
    Wrong("run --suite ops --num-processes 2", "found --num-processes", "give all three", "multi_"),
    Wrong("golden", "found no directory", "at least one recorded folder", "give one, such as"),
    Wrong("golden nowhere empty unknown", "unknown kind 'seance'", "Expected one of ops", "README"),
    Wrong("golden record", "format: found 2, expected 1", "device: missing, expected", "docs/rec"),
    Wrong("golden nowhere --tp 0", "--tp: found 0", "expected at least 1", "change it"),
    Wrong("compare tiny/target --backend latency_specialized", "devices found: cpu",
          "an NVIDIA GPU", "Use decode_backend 'auto'"),
    Wrong(f"golden {RECORDED}/ops --backend latency_specialized", "found ops",
          "records of an engine only", "leave them out", "compare --backend"),
    Wrong("golden nowhere --report file", "file is a file", "expected a directory", "choose"),
    Wrong("compare nowhere", "not a directory", "Expected a checkpoint directory", "config.json"),
    Wrong("compare nowhere --steps 0 --prompt-ids x", "nowhere: not a directory",
          "--steps: found 0, expected", "--prompt-ids: found 'x', expected an existing file"),
    Wrong("compare tiny/target --report tiny/target/new", "tiny/target, which is input",
          "a place outside of checkpoints", "choose another place"),
    Wrong("golden record --json record/golden.json", "record, which is input",
          "a place outside of checkpoints", "choose another place"),
    Wrong("compare half", "cut short", "header and size do not agree", FETCH),
    Wrong("compare tiny/target --steps 0 --prompt-ids 384", "--steps: found 0", "expected ids of",
          "use this model's tokenizer"),
    Wrong("compare tiny/target --steps 4096", "found 4096", "expected 1 to 4072", "change it"),
    Wrong("compare tiny/target --draft nowhere --steps 5000", "--draft: nowhere",
          "the config.json of a DSpark draft", "--steps: found 5000", "change it"),
    Wrong("compare tiny/target --draft tiny/draft --steps 600", "may write 4840 tokens",
          "at most 4096", "ask for fewer"),
    Wrong("compare tiny/target --json full", "full is a directory", "name of a file", "choose"),
    Wrong("serve --url h:1 --model m --tokens 0", "found 'h:1'", "expected http://", "base"),
    Wrong(f"serve {WRONG}", "127.0.0.1:9", "an OpenAI-compatible server", "start it"),
    Wrong(f"serve {WRONG} --checkpoint nowhere --prompts no --record full --draft other_model",
          "--prompts: found no file no", "expected an absent or empty directory", "choose another"),
    Wrong("serve --model m", "Missing from", "--url STR", PRINTED),
)  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    make_workspace(folder)
    return folder


@pytest.fixture(autouse=True)
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)


@pytest.mark.parametrize("wrong", K3, ids=lambda w: w.command)
def test_k3(wrong, workspace, capsys):
    assert not problems(cli.main, wrong, capsys, workspace)


@pytest.mark.parametrize("wrong", PARITY, ids=lambda w: w.command)
def test_parity(wrong, workspace, capsys):
    pytest.importorskip("torch")
    assert not problems(parity_command.main, wrong, capsys, workspace)


def refuse(file, *_):
    """An `open` or a listing that the system refuses, as it does to others than root."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


@pytest.mark.parametrize("closed", ["open", "iterdir"], ids=["files", "folder"])
@pytest.mark.parametrize("command", ["check tiny/target", "convert tiny/target out"])
def test_what_may_not_be_read_is_not_called_damaged(
    closed, command, workspace, monkeypatch, capsys
):
    if closed == "open":
        monkeypatch.setattr(system, "open", refuse, raising=False)
        found = "tiny/target: 5 of 5 file(s) cannot be read"
    else:
        monkeypatch.setattr(system.Path, "iterdir", refuse)
        found = "tiny/target: found 'Permission denied'"
    wrong = Wrong(command, found, "expected permission for this user", "change the permissions")
    assert not problems(cli.main, wrong, capsys, workspace)
    status_of(cli.main, command)
    assert "etch" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "do"),
    [(errno.EACCES, "permissions"), (errno.ENOSPC, "another disk"), (errno.EIO, "choose another")],
)
def test_errors_of_the_system_say_what_to_do(number, do, monkeypatch, capsys):
    def fail(*_):
        raise OSError(number, os.strerror(number), "a/file")

    monkeypatch.setattr("jax_impl.draft_config.is_draft", fail)
    assert status_of(cli.main, "check tiny/target") == 2
    said = plain(capsys.readouterr().err)
    assert f"a/file: found '{os.strerror(number)}', expected" in said and do in said


def test_no_row_is_given_twice():
    commands = [w.command for w in K3 + PARITY]
    assert len(commands) == len(set(commands)) > 80


def test_what_a_message_lacks_is_found():
    wrong = Wrong("x", "found 1", "expected 2", "change it")
    assert not lacking("k3: found 1,\n  expected 2;  change it", wrong)
    assert len(lacking("k3: found 1", wrong)) == 2
    assert plain("│ a │\n ------ b") == "a b"
