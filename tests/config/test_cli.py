"""The command line: every flag parses, and every mistake is one line that names it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from datasets.errors import DataError
from datasets.paths import default_data_root
from maml.__main__ import PROGRAMS
from maml.__main__ import main as program
from maml.config import FLAGS, Config, flag, registry
from maml.config.cli import parse
from maml.config.presets import PRESETS
from maml.errors import UserError
from maml.processes.program import run_program
from tests.launching import TRAIN, run, run_torchrun
from tests.runs import as_flags, glyphs, sinusoid

GLYPHS = "maml-glyphs-5way-1shot"
SINUSOID = "maml-sinusoid-10shot"
SUPERVISED = "supervised-glyphs-lenet"
FIRST_USE = r"(drawing|decoding|reading|downloading|compiling) "
# What the help may be framed with, depending on the terminal.
FRAME = r"[│╭╮╰╯─]+"
NOT_FLAGS = ("preset", "source", "published", "claim")
FIELDS = list(FLAGS)

COUNTED = [
    "--filters", "--ways", "--shots", "--queries", "--eval-queries", "--inner-steps",
    "--batch-size", "--eval-inner-steps", "--iterations", "--meta-batch-size", "--task-batch",
    "--eval-every", "--eval-tasks", "--test-tasks", "--checkpoint-every", "--keep-checkpoints",
    "--log-every", "--check-every", "--ps-max-staleness", "--ps-backup-workers", "--cg-steps",
    "--image-size", "--horizon",
]  # fmt: skip
ASYNC = ["--strategy", "param-server", "--ps-mode", "async"]
BACKUP = ["--strategy", "param-server", "--ps-mode", "backup"]
KEPT = ["--learner", "reptile", "--inner-optimizer", "adam0", "--meta-optimizer", "sgd"]
POLE = ["--data", "cartpole", "--network", "mlp"]
OBSERVERS = ["--strategy", "observers", "--learner", "reinforce", *POLE]

# For each flag, words after the preset and the value that the field must then have.
VALUES: dict[str, tuple[list[str], Any]] = {
    "learner": (["--learner", "supervised"], "supervised"),
    "network": (["--network", "mlp", "--data", "sinusoid"], "mlp"),
    "inner_lr": (["--inner-lr", "0.125"], 0.125),
    "inner_steps": (["--inner-steps", "4"], 4),
    "eval_inner_steps": (["--eval-inner-steps", "7"], 7),
    "inner_optimizer": (["--inner-optimizer", "adam"], "adam"),
    "order": (["--order", "first"], "first"),
    "leak": (["--leak", "0.01"], 0.01),
    "meta_schedule": (["--meta-schedule", "cosine"], "cosine"),
    "meta_lr_end": (["--meta-lr-end", "1e-5", "--meta-schedule", "linear"], 1e-5),
    "meta_halve_every": (["--meta-halve-every", "5", "--meta-schedule", "halving"], 5),
    "meta_decay": (["--meta-decay", "0.9", "--meta-schedule", "halving"], 0.9),
    "meta_eps": (["--meta-eps", "1e-3"], 1e-3),
    "adapt": (["--adapt", "@head"], "@head"),
    "cg_lambda": (["--cg-lambda", "12", "--learner", "imaml"], 12.0),
    "eval_proximal": (["--eval-proximal", "0", "--learner", "imaml"], 0.0),
    "discount": (["--discount", "0.5", "--learner", "reinforce", *POLE], 0.5),
    "meta_gradient": (["--meta-gradient", "mixed"], "mixed"),
    "kernels": (["--kernels", "torch"], "torch"),
    "eval_draws": (["--eval-draws"], True),
    "batching": (["--batching", "tasks"], "tasks"),
    "compile": (["--compile", "on"], "on"),
    "data": (["--data", "omniglot"], "omniglot"),
    "data_root": (["--data-root", "/some/where"], "/some/where"),
    "init": (["--init", "/some/run"], "/some/run"),
    "horizon": (["--horizon", "50", "--learner", "reinforce", *POLE], 50),
    "split_fractions": (["--split-fractions", "0.5,0.2,0.3", "--data", "folder"], "0.5,0.2,0.3"),
    "ways": (["--ways", "3"], 3),
    "shots": (["--shots", "2"], 2),
    "keep_moment": (["--keep-moment", *KEPT], True),
    "inner_batch": (["--inner-batch", "9", "--learner", "reptile"], 9),
    "eval_inner_batch": (["--eval-inner-batch", "9", "--learner", "reptile"], 9),
    "train_ways": (["--train-ways", "9", "--learner", "protonet"], 9),
    "train_shots": (["--train-shots", "9", "--learner", "protonet"], 9),
    "queries": (["--queries", "6"], 6),
    "eval_queries": (["--eval-queries", "15"], 15),
    "batch_size": (["--batch-size", "32", "--learner", "supervised"], 32),
    "seed": (["--seed", "7"], 7),
    "iterations": (["--iterations", "12"], 12),
    "epochs": (["--epochs", "3", "--learner", "supervised"], 3),
    "meta_batch_size": (["--meta-batch-size", "9"], 9),
    "meta_lr": (["--meta-lr", "2e-4"], 2e-4),
    "meta_optimizer": (["--meta-optimizer", "sgd"], "sgd"),
    "meta_momentum": (["--meta-momentum", "0.9", "--meta-optimizer", "sgd"], 0.9),
    "grad_clip": (["--grad-clip", "10"], 10.0),
    "weight_decay": (["--weight-decay", "1e-2"], 0.01),
    "freeze": (["--freeze", "@body"], "@body"),
    "on_nonfinite": (["--on-nonfinite", "skip"], "skip"),
    "strategy": (["--strategy", "local"], "local"),
    "partition": (["--partition", "chunk"], "chunk"),
    "rpc_threads": (["--rpc-threads", "4"], 4),
    "timeout": (["--timeout", "30.5"], 30.5),
    "ps_max_staleness": (["--ps-max-staleness", "3", *ASYNC], 3),
    "ps_backup_workers": (["--ps-backup-workers", "2", *BACKUP], 2),
    "batch_wait": (["--batch-wait", "0.5", *OBSERVERS], 0.5),
    "threads": (["--threads", "2"], 2),
    "task_batch": (["--task-batch", "5"], 5),
    "dtype": (["--dtype", "float64"], "float64"),
    "precision": (["--precision", "bf16"], "bf16"),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "eval_every": (["--eval-every", "0"], 0),
    "eval_tasks": (["--eval-tasks", "20"], 20),
    "test_tasks": (["--test-tasks", "0"], 0),
    "test_model": (["--test-model", "best"], "best"),
    "transductive": (["--no-transductive"], False),
    "run_dir": (["--run-dir", "some/run"], "some/run"),
    "checkpoint_every": (["--checkpoint-every", "3"], 3),
    "keep_checkpoints": (["--keep-checkpoints", "2"], 2),
    "keep_best": (["--keep-best", "3"], 3),
    "resume": (["--resume", "never"], "never"),
    "log_every": (["--log-every", "1"], 1),
    "logger": (["--logger", "tensorboard"], "tensorboard"),
}


def _of_own_flag(kind: str, component: str, name: str) -> tuple[list[str], Any]:
    """Another value of a component's own flag than its default, and the words for it."""
    default = getattr(Config(), name)
    if isinstance(default, bool):
        return [flag(name if not default else f"no_{name}"), f"--{kind}", component], not default
    choices = get_args(get_type_hints(Config)[name])
    value = next(c for c in choices if c != default) if isinstance(default, str) else default + 1
    return [flag(name), str(value), f"--{kind}", component], value


for _kind in registry.KINDS:
    for _component in registry.known(_kind).values():
        for _name in _component.flags.keys() - VALUES.keys():
            VALUES[_name] = _of_own_flag(_kind, _component.name, _name)

# The contract: these flags must exist under these names.
CONTRACT = [
    "--seed", "--data-root", "--run-dir", "--iterations", "--meta-batch-size", "--ways", "--shots",
    "--queries", "--inner-lr", "--inner-steps", "--eval-inner-steps", "--inner-optimizer",
    "--meta-lr", "--order", "--strategy", "--partition", "--eval-every", "--eval-tasks",
    "--checkpoint-every", "--resume", "--logger", "--dtype", "--device",
]  # fmt: skip


@pytest.fixture(scope="module")
def help_text() -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    return re.sub(FRAME, "", output.getvalue())


@pytest.mark.parametrize("name", FIELDS)
def test_flag_parses(name: str) -> None:
    words, value = VALUES[name]
    before, after = PRESETS[GLYPHS], parse([GLYPHS, *words])
    assert getattr(after, name) == value
    assert type(getattr(after, name)) is type(value)
    assert getattr(before, name) != value
    touched = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    for other in FIELDS + list(NOT_FLAGS):
        if other != name and other not in touched:
            assert getattr(after, other) == getattr(before, other)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_sets_is_not_given(name: str) -> None:
    """Spelled out, or on top of it another network, data set or learner: no mistake."""
    preset = PRESETS[name]
    assert parse([name]) == preset
    assert parse(as_flags(preset)) == preset
    known = registry.data_set(preset.data)
    few_shot = preset.data if known.episodes and known.examples else "glyphs"
    # Of one class, as a function is, there is nothing to tell apart.
    given = [name, "--ways", "5"] if preset.ways == 1 else [name]
    parse([*given, "--data", "miniimagenet", "--network", "conv4-pool", "--learner", "maml"])
    parse([*given, "--data", few_shot, "--network", "conv4", "--learner", "maml"])
    parse([*given, "--data", few_shot, "--network", "lenet", "--learner", "supervised"])


def test_what_a_preset_is_called_is_no_flag() -> None:
    for name in NOT_FLAGS:
        with pytest.raises(UserError, match=f"{flag(name)}"):
            parse([GLYPHS, flag(name), "0.5"])


def test_flags_spell_a_configuration_out() -> None:
    config = sinusoid(seed=3, grad_clip=0.5, transductive=False)
    assert parse(as_flags(config)) == config


@pytest.mark.parametrize("name", FIELDS)
def test_help_explains_every_flag(name: str, help_text: str) -> None:
    options = re.split(r"\n\s*(?=-)", help_text)
    block = [option for option in options if re.match(rf"{re.escape(flag(name))}[\s,]", option)]
    assert len(block) == 1, f"{flag(name)} is not in --help"
    said = re.sub(r"--\S+|\{[^}]*\}\S*|\(default.*", "", block[0], flags=re.DOTALL)
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\b(INT|FLOAT|STR)\b", "", said))
    assert len(words) >= 2, block[0]


@pytest.mark.parametrize("spelled", CONTRACT)
def test_contract_has_flag(spelled: str) -> None:
    assert spelled in map(flag, FIELDS)


def test_contract_has_choices(help_text: str) -> None:
    joined = re.sub(r"\s+", "", help_text)
    assert "--order{second,first}" in joined
    assert "--partition{exclusive,chunk}" in joined
    assert "--logger{wandb,tensorboard,none}" in joined


def test_help_has_groups_and_lists_components(help_text: str) -> None:
    titles = re.findall(r"^(\w[\w ,]*):$", help_text, flags=re.MULTILINE)
    assert titles == [
        "options", "learner", "data", "outer loop", "distribution", "evaluation", "output",
        "other learners, networks, data sets and strategies",
    ]  # fmt: skip
    for kind in registry.KINDS:
        block = re.split(r"\n  (?=-)", help_text.partition(f"--{kind} NAME")[2])[0]
        for name in registry.known(kind):
            assert re.search(rf"^ +{name}: \w", block, flags=re.MULTILINE), name
        assert "module:attribute" in block


def test_help_is_of_what_reads_a_flag(help_text: str) -> None:
    """Said by the components, not by the flag."""
    for name, readers in {
        "proximal": "imaml", "filters": "conv4, conv4-flat, conv4-pool", "ps_mode": "param-server",
        "ps_max_staleness": "async", "omniglot_split": "omniglot", "epochs": "supervised",
    }.items():  # fmt: skip
        of_any_lines = readers.replace(" ", r"\s+")
        assert re.search(rf"{flag(name)}( \S+)?\s+{of_any_lines}: [A-Z]", help_text), name


def test_help_may_be_cut_short() -> None:
    for command in ("train_maml.py --help", "-m maml.evaluate --help"):
        done = run(
            ["bash", "-c", f"set -o pipefail; {sys.executable} {command} | true"], timeout=60
        )
        assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--iterations", "1e3"], "iterations", 1000),
        (["--iterations=2E1"], "iterations", 20),
        (["--seed", "9223372036854775807"], "seed", 2**63 - 1),
        (["--meta_lr", "1e-2"], "meta_lr", 0.01),
        (["--threads", "None"], "threads", None),
        # As sweeps spell them.
        (["--transductive=False"], "transductive", False),
        (["--no-transductive", "--transductive=True"], "transductive", True),
    ],
)
def test_spellings(words: list[str], name: str, value: Any) -> None:
    found = getattr(parse([GLYPHS, *words]), name)
    assert (found, type(found)) == (value, type(value))


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--presets"])
    listed = capsys.readouterr().out.split()
    assert stop.value.code == 0 and [name for name in PRESETS if name not in listed] == []


def test_help_of_a_preset_shows_its_own_values_first() -> None:
    done = run([*TRAIN, "maml-omniglot-20way-5shot", "--help"], timeout=60)
    text = re.sub(r"[│\s]+", " ", done.stdout)
    assert re.search(r"--ways INT [^(]*\(default: 20\)", text)
    assert re.search(r"--inner-lr FLOAT [^(]*\(default: 2\.0\)", text)
    own, others = text.split("other learners, networks, data sets and strategies:")
    assert "--omniglot-split" in own and "--proximal" in others


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MAML_DATA": "/some/data"}, "/some/data"),
        ({"MAML_DATA": "here/data"}, f"{os.getcwd()}/here/data"),
        ({"MAML_DATA": "~/data", "HOME": "/some/home"}, "/some/home/data"),
        ({"HOME": "/some/home"}, "/some/home/.cache/maml"),
        ({"HOME": "/some/home", "MAML_DATA": ""}, "/some/home/.cache/maml"),
    ],
)
def test_data_root_default(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAML_DATA")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Config().data_root == str(default_data_root()) == expected


@pytest.mark.parametrize("spelled", ["data", "~/data", "/other/data"])
def test_data_root_is_absolute(
    spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml keeps it, and is read from other folders."""
    monkeypatch.setenv("HOME", "/some/home")
    monkeypatch.chdir(tmp_path)
    found = parse([GLYPHS, "--data-root", spelled]).data_root
    assert found == {"data": f"{tmp_path}/data", "~/data": "/some/home/data"}.get(spelled, spelled)


# ---- bad input, told before anything is opened ------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "PRESET"),
        (["maml-glyph-5way-1shot"], "did you mean maml-glyphs-5way-1shot?"),
        (["maml-omniglot-5way-2shot"], "maml-omniglot-5way-1shot --shots 2 .*; those of --data om"),
        (["maml-miniimagenet-9way-1shot"], "maml-miniimagenet-5way-1shot --ways 9 is "),
        (["folder"], "none is of --data folder; .*maml-omniglot-5way-1shot --data folder"),
        ([GLYPHS, "--ways", "1"], "--ways 1: .* give 2 or more"),
        ([GLYPHS, "--train-ways", "1"], "--train-ways 1: .* give 2 or more"),
        (["anil-sinusoid-10shot"], "did you mean maml-sinusoid-10shot"),
        (["mnist"], "those of --data mnist are supervised-mnist-lenet"),
        (["metasgd"], "those of --learner metasgd are metasgd-glyphs-5way-1shot"),
        (["nonsense"], "'nonsense'.*--presets"),
        (["--ways", "5"], "--ways: the PRESET comes before the flags"),
        (["--config"], "--config: needs"),
        (["--config=/no/where"], "/no/where: No such file"),
        ([GLYPHS, "--nonsense", "1"], "--nonsense"),
        ([GLYPHS, "--iteration", "1"], "--iteration.*--iterations"),
        ([GLYPHS, "--inner-step=1"], "--inner-step=1: did you mean --inner-steps"),
        ([GLYPHS, "--ways", "1e400"], "--ways.*'1e400'"),
        ([GLYPHS, "stray"], "stray"),
        ([GLYPHS, "--ways"], "--ways"),
        ([GLYPHS, "--ways", "five"], "--ways.*'five'"),
        ([GLYPHS, "--ways", "2.5"], "--ways.*'2.5'"),
        ([GLYPHS, "--inner-lr", "fast"], "--inner-lr.*'fast'"),
        ([GLYPHS, "--grad-clip", "much"], "--grad-clip.*'much'"),
        ([GLYPHS, "--order", "third"], "--order.*'second', 'first'"),
        ([GLYPHS, "--inner-optimizer", "sdg"], "--inner-optimizer.*'sgd'"),
        ([GLYPHS, "--strategy", "magic"], "--strategy"),
        ([GLYPHS, "--partition", "halves"], "--partition"),
        ([GLYPHS, "--logger", "stdout"], "--logger"),
        ([GLYPHS, "--dtype", "float16"], "--dtype"),
        ([GLYPHS, "--precision", "fp8"], "--precision"),
        ([GLYPHS, "--precision", "bf16", "--dtype", "float64"], "--precision bf16.*--dtype"),
        ([GLYPHS, "--precision", "tf32", "--dtype", "float64"], "--precision tf32.*--dtype"),
        ([GLYPHS, "--precision", "bf16", "--kernels", "native"], "--kernels native.*--precision"),
        ([GLYPHS, "--compile", "yes"], "--compile"),
        ([GLYPHS, "--compile", "on", "--kernels", "native"], "--compile on.*--kernels native"),
        ([GLYPHS, "--data", "imagenet"], "--data imagenet: .*miniimagenet"),
        ([GLYPHS, "--learner", "mamml"], "--learner mamml: .*did you mean maml"),
        ([GLYPHS, "--omniglot-split", "mine"], "--omniglot-split"),
        ([GLYPHS, "--transductive", "perhaps"], "perhaps"),
        ([GLYPHS, "--network", "mlp"], "--network mlp.*--data glyphs"),
        (["maml-sinusoid-10shot", "--network", "conv4"], "--network conv4.*--data sinusoid"),
        ([GLYPHS, "--epochs", "3"], "--epochs 3: .*--iterations"),
        ([SUPERVISED, "--epochs", "0"], "--epochs must be at least 1, not 0"),
        ([GLYPHS, "--data", "mnist"], "--data mnist: --learner maml .*--learner supervised"),
        ([SUPERVISED, "--data", "sinusoid"], "--data sinusoid: --learner supervised"),
        ([SUPERVISED, "--data", "miniimagenet"], "--data miniimagenet: .*--learner supervised"),
        ([SUPERVISED, "--network", "mlp"], "--network mlp.*--data glyphs"),
        ([SUPERVISED, "--kernels", "native"], "--kernels native: .*inner loop"),
        ([SUPERVISED, "--meta-gradient", "mixed"], "--meta-gradient mixed: .*inner loop"),
        ([GLYPHS, "--ps-mode", "async"], "--ps-mode async.*--strategy param-server, not auto"),
        ([GLYPHS, *BACKUP, "--ps-max-staleness", "3"], "--ps-max-staleness 3.*--ps-mode async"),
        ([GLYPHS, *ASYNC, "--ps-backup-workers", "2"], "--ps-backup-workers 2.*--ps-mode backup"),
        *(
            (
                [SUPERVISED, name, value],
                f"{name} {value} is for --learner maml or others, not supervised",
            )
            for name, value in {
                "--inner-lr": "3.0", "--inner-steps": "2", "--eval-inner-steps": "9",
                "--inner-optimizer": "adam", "--order": "first", "--shots": "7", "--queries": "7",
                "--eval-queries": "7",
            }.items()
        ),
        ([GLYPHS, "--keep-best", "3", "--eval-every", "0"], "--eval-every 0: --keep-best 3 keeps"),
        *(
            ([GLYPHS, "--learner", name, "--head-init", "normal"], f": --learner {name} takes the")
            for name in ("protonet", "r2d2")
        ),
        ([GLYPHS, "--batch-size", "9"], "--batch-size 9 is for --learner finetune or superv"),
        ([SINUSOID, "--batch-size", "9"], "--batch-size 9 is for --learner finetune or superv"),
        ([SINUSOID, "--filters", "3"], "--filters 3 is for --network conv4, conv4-flat or"),
        ([SUPERVISED, "--filters", "3"], "--filters 3 is for --network conv4, .*, not lenet"),
        ([SINUSOID, "--ways", "7"], "--ways 7: --data sinusoid has no classes"),
        ([SINUSOID, "--omniglot-split", "vinyals"], "vinyals is for --data omniglot, not sinusoid"),
        ([GLYPHS, "--omniglot-split", "mamlpp"], "mamlpp is for --data omniglot, not glyphs"),
        ([SUPERVISED, "--epochs", "1", "--iterations", "6"], "--epochs 1 and --iterations 6: "),
        ([GLYPHS, "--check-every", "3"], "--check-every 3 is for --strategy allreduce"),
        ([GLYPHS, "--strategy", "allreduce", "--partition", "chunk"], "--partition chunk.*rpc"),
        ([GLYPHS, "--meta-momentum", "0.5"], "--meta-momentum.*--meta-optimizer adam"),
        ([GLYPHS, "--learner", "metasgd", "--inner-steps", "0"], "--inner-steps 0.*metasgd"),
        ([GLYPHS, "--learner", "imaml", "--proximal", "0"], "--proximal must be positive"),
        ([GLYPHS, "--learner", "imaml", "--cg-damping", "-1"], "--cg-damping must be at least 0"),
        ([GLYPHS, "--learner", "imaml", "--cg-damping", "nan"], "--cg-damping must be at least 0"),
        ([GLYPHS, "--train-ways", "9"], "--train-ways 9 is for --learner .* or .*, not maml"),
        ([GLYPHS, "--proximal", "1"], "--proximal 1.0 is for --learner imaml, not maml"),
        ([GLYPHS, "--learner", "imaml", "--order", "first"], "--order first is for --learner maml"),
        (
            [GLYPHS, "--learner", "imaml", "--meta-gradient", "reverse"],
            "--meta-gradient reverse: .*imaml is implicit",
        ),
        *(
            ([GLYPHS, "--meta-optimizer", "sgd", "--meta-momentum", value], "--meta-momentum")
            for value in ("-0.1", "1", "nan")
        ),
        *(
            ([GLYPHS, name, value], rf"{name}\b.*{re.escape(shown)}")
            for name in ("--inner-lr", "--meta-lr", "--grad-clip", "--timeout")
            for value, shown in (("0", "0"), ("-1", "-1"), ("nan", "nan"), ("inf", "inf"))
        ),
        *(
            ([GLYPHS, name, str(least - 1)], rf"{name}\b.*{least}.*{least - 1}")
            for name, least in {
                "--filters": 1, "--ways": 1, "--shots": 1, "--queries": 1, "--eval-queries": 1,
                "--inner-steps": 0, "--batch-size": 1,
                "--eval-inner-steps": 0, "--iterations": 0, "--meta-batch-size": 1, "--seed": 0,
                "--rpc-threads": 2, "--task-batch": 1, "--eval-every": 0, "--eval-tasks": 1,
                "--test-tasks": 0, "--checkpoint-every": 1, "--keep-checkpoints": 1,
                "--log-every": 1, "--threads": 1,
                "--check-every": 0, "--ps-max-staleness": 0, "--ps-backup-workers": 0,
            }.items()
        ),
        *(
            ([GLYPHS, name, str(most + 1)], rf"{name} must be at most {most}\b.*, not {most + 1}$")
            for name, most in dict.fromkeys(COUNTED, 2**31 - 1).items()
        ),
        ([SUPERVISED, "--epochs", str(2**31)], "--epochs must be at most 2147483647, not"),
        *(
            ([GLYPHS, name, ""], rf'^{name} "": empty; was a shell variable not set\?$')
            for name in ("--run-dir", "--data-root", "--resume", "--device")
        ),
        ([GLYPHS, "--seed", str(2**63)], "--seed must be at most 9223372036854775807, not"),
        ([GLYPHS, "--rpc-threads", "4097"], "--rpc-threads must be at most 4096, not 4097"),
        ([GLYPHS, "--timeout", "2000001"], "--timeout must be at most 2000000, not 2000001"),
        *(
            ([GLYPHS, "--threads", str(value)], f"--threads must be at most .*not {value}")
            for value in (8 * (os.cpu_count() or 1) + 1, 2**40)
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) or "nothing" if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_flags(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(arguments)
    message = str(caught.value)
    assert re.search(says, message), message
    assert len(message.splitlines()) == 1
    assert "│" not in message


def test_the_most_that_a_flag_takes() -> None:
    unread = ("--ps", "--check-", "--b", "--cg", "--image-", "--horizon")
    most = {name: 2**31 - 1 for name in COUNTED if not name.startswith(unread)}
    most |= {"--seed": 2**63 - 1, "--threads": 8 * (os.cpu_count() or 1), "--timeout": 2_000_000}
    config = parse([GLYPHS, *(str(word) for pair in most.items() for word in pair)])
    assert (config.seed, config.meta_batch_size) == (2**63 - 1, 2**31 - 1)


# ---- bad input, told by the whole program -----------------------------------------------------


@pytest.fixture
def mistake(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run the program here and return its only line on stderr, without ``error: ``."""
    import train_maml

    def call(*arguments: str) -> str:
        # Should the mistake go unnoticed, let it not be for a whole run in the repository.
        words = [*arguments, "--iterations", "0", "--logger", "none"]
        if "--test-tasks" not in words:
            words += ["--test-tasks", "1"]
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as stop:
            run_program(train_maml.main, words)
        said = capfd.readouterr().err.splitlines(keepends=True)
        # Data that no test has used before is drawn or decoded now, and says so.
        err = "".join(line for line in said if not re.match(FIRST_USE, line))
        assert stop.value.code == 2, err
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        return err[len("error: ") : -1]

    return call


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ways 801", r"--ways 801: the train split has only 800 classes"),
        ("--ways 101", r"--ways 101: the validation split has only 100 classes"),
        ("--ways 101 --eval-every 0 --test-tasks 0", None),
        ("--ways 201 --eval-every 0", r"--ways 201: the test split has only 200 classes"),
        ("--shots 10 --queries 11", r"--shots 10 and --queries 11.* 21 .* 20"),
        ("--shots 1 --eval-queries 20", r"--shots 1 and --eval-queries 20.* 21 .* 20"),
        ("--device cuda", r"--device cuda: .*GPU"),
        ("--device cuda:3", r"--device cuda:3: .*GPU"),
        ("--device nonsense", r"--device nonsense"),
        ("--device mps", r"--device mps"),
        ("--resume here.pt", r"--resume here.pt: no such file"),
        (
            "--strategy param-server",
            r"param-server: needs 2 processes: one serves, others train$",
        ),
    ],
)
def test_bad_requests(
    flags: str,
    says: str | None,
    tmp_path: Path,
    mistake: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    directory = tmp_path / "run"
    arguments = [GLYPHS, "--run-dir", str(directory), *flags.split()]
    if says is None:  # whatever splits a run does not open have no say
        from maml.trainer import Trainer

        Trainer(parse(arguments))
        return
    message = mistake(*arguments)
    assert re.search(says, message), message
    assert not directory.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ways 801", r"--ways 801: the train split has only 800 classes"),
        ("--batch-size 1401", r"--batch-size 1401: the train split has only 1400 examples"),
        ("--batch-size 201", r"--batch-size 201: the validation split has only 200 examples"),
        ("--batch-size 401 --eval-every 0", r"--batch-size 401: the test split has only 400 ex"),
        ("--data mnist", r"--ways 100: mnist has 10 classes; give --ways 10"),
    ],
)
def test_bad_requests_of_a_classifier(
    flags: str, says: str, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    directory = tmp_path / "run"
    message = mistake(SUPERVISED, "--run-dir", str(directory), *flags.split())
    assert re.search(says, message), message
    assert not directory.exists()


def test_missing_data_of_a_classifier(
    tmp_path: Path, mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    message = mistake("supervised-cifar10-resnet18", "--data-root", str(tmp_path / "nothing"))
    assert message.startswith(f"{tmp_path}/nothing/cifar10: cifar10 is missing")
    assert "--data-root" in message
    assert not (tmp_path / "nothing").exists()


def test_missing_data_names_three_ways_out(
    tmp_path: Path, mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    message = mistake("maml-omniglot-5way-1shot", "--data-root", str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing" / "omniglot") in message
    for way_out in ("images_background.zip", "--data-root", "download", "maml-glyphs"):
        assert way_out in message
    assert not (tmp_path / "nothing").exists()


def test_unreadable_image_is_named(
    data_root: Path,
    tmp_path: Path,
    mistake: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What was decoded once is not decoded again.
    monkeypatch.setenv("MAML_CACHE", str(tmp_path / "cache"))
    original = data_root / "omniglot"
    if not (original / "images_background.zip").is_file():
        pytest.skip(f"{original} holds no archives")
    folder = tmp_path / "omniglot"
    folder.mkdir()
    (folder / "images_evaluation.zip").symlink_to(original / "images_evaluation.zip")
    damaged = folder / "images_background.zip"
    shutil.copyfile(original / "images_background.zip", damaged)
    with zipfile.ZipFile(damaged) as archive:
        victim = sorted(name for name in archive.namelist() if name.endswith(".png"))[5]
        info = archive.getinfo(victim)
    content = bytearray(damaged.read_bytes())
    name_length = int.from_bytes(
        content[info.header_offset + 26 : info.header_offset + 28], "little"
    )
    extra_length = int.from_bytes(
        content[info.header_offset + 28 : info.header_offset + 30], "little"
    )
    data = info.header_offset + 30 + name_length + extra_length
    assert info.compress_size > 20
    content[data : data + 20] = bytes(20)
    damaged.write_bytes(content)
    message = mistake("maml-omniglot-5way-1shot", "--data-root", str(tmp_path))
    assert str(damaged) in message
    assert victim in message


@pytest.mark.parametrize("kind", ["file", "under a file", "dangling link"])
def test_run_dir_that_cannot_be(kind: str, tmp_path: Path, mistake: Callable[..., str]) -> None:
    path = tmp_path / "here"
    if kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere" / "else")
    else:
        path.write_text("a file\n")
    directory = path / "run" if kind == "under a file" else path
    message = mistake(SINUSOID, "--run-dir", str(directory))
    what = "a link to nothing" if kind == "dangling link" else "a file"
    assert message == f"--run-dir {directory}: {path} is {what}"
    assert kind == "dangling link" or path.read_text() == "a file\n"


@pytest.mark.parametrize("name", ["--run-dir", "--data-root"])
def test_folder_of_nobody(name: str, mistake: Callable[..., str]) -> None:
    assert mistake(SINUSOID, name, "~no-such-user/x").startswith(f"{name} ~no-such-user/x: ")


def test_run_dir_that_may_not_be_written(tmp_path: Path, mistake: Callable[..., str]) -> None:
    # Root may write anywhere; /proc refuses even root.
    directory = Path("/proc/self/run") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid() != 0:
        directory.mkdir(mode=0o500)
    message = mistake(SINUSOID, "--run-dir", str(directory))
    assert message.startswith(f"--run-dir {directory}: ")


def test_data_error_is_a_line_too(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: list[str]) -> None:
        raise DataError("some/file.zip: damaged")

    with pytest.raises(SystemExit) as stop:
        run_program(fail, [])
    assert stop.value.code == 2
    assert capfd.readouterr().err == "error: some/file.zip: damaged\n"


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    def fail(arguments: list[str]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_program(fail, [])


def test_legal_flags_meet_no_warning_of_a_library(tmp_path: Path) -> None:
    """TorchOpt's Adam batched over tasks, and torch's forward derivatives, warn of themselves."""
    flags = "--inner-optimizer adam --meta-gradient mixed --iterations 1 --test-tasks 1"
    words = [SINUSOID, *flags.split(), "--logger", "none", "--run-dir", str(tmp_path)]
    assert "arning" not in run([*TRAIN, *words], timeout=120).stderr


# ---- the same under torchrun: said once, nothing hangs ----------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["maml-glyphs-5way-1shot", "--run-dir", "train_maml.py"], "--run-dir train_maml.py: "),
        (["maml-sinusoid-10shot", "--strategy", "local"], "--strategy local runs in one process"),
    ],
    ids=["known to one", "known to all"],
)
def test_bad_input_under_torchrun(flags: list[str], says: str, cache_dir: Path) -> None:
    done = run_torchrun(
        2, [*flags, "--logger", "none"], 90, expect=None, env={"MAML_CACHE": str(cache_dir)}
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {says}")
    # torchrun has its own page, which ends with our line; none of ours is a traceback.
    assert f"traceback : {errors[0]}" in done.stderr.rpartition("Root Cause")[2]
    assert 'train_maml.py", line' not in done.stderr


def test_glyphs_helper_is_what_it_says() -> None:
    assert parse(as_flags(glyphs())) == glyphs()


def test_all_programs_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in PROGRAMS:
        with pytest.raises(SystemExit) as ended:
            program([name, "--help"])
        assert ended.value.code == 0
        assert "usage: " in capsys.readouterr().out
    assert program([]) == 0
    with pytest.raises(UserError, match=r"^maml trian: no such program; train, evaluate, "):
        program(["trian"])
    done = run([sys.executable, "-m", "maml", "train", "--presets"], 60)
    assert "maml-omniglot-5way-1shot" in done.stdout
