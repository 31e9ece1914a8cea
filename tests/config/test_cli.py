"""The command line: every flag parses, and every mistake is one line that names it."""

import contextlib
import io
import os
import re
import sys
import urllib.request
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
from maml.config.fields import FACTS
from maml.config.presets import PRESETS
from maml.errors import UserError
from maml.processes.program import run_program
from tests.launching import TRAIN, run, run_torchrun
from tests.runs import as_flags

GLYPHS = "maml-glyphs-5way-1shot"
SINUSOID = "maml-sinusoid-10shot"
SUPERVISED = "supervised-glyphs-lenet"
FIRST_USE = r"(drawing|decoding|reading|downloading|compiling|waiting for) "
NOT_FLAGS = ("preset", "source", "published", "claim")

# Values of flags that are texts, and what else some flags need.
TEXTS = {
    "learner": "protonet", "network": "conv4-pool", "data": "omniglot", "strategy": "local",
    "adapt": "@head", "freeze": "@body", "device": "cuda:1", "data_root": "/some/where",
    "init": "/some/run", "run_dir": "some/run", "resume": "never",
    "split_fractions": "0.5,0.2,0.3",
}  # fmt: skip
ACTING = "--data cartpole --network mlp --learner"
EXTRA = {
    "keep_moment": "--learner reptile --meta-optimizer sgd",
    **dict.fromkeys(("discount", "horizon"), f"{ACTING} reinforce"),
    "batch_wait": f"--strategy observers {ACTING} reinforce",
}


def another(name: str) -> tuple[list[str], Any]:
    """Another value of a flag than the preset's, and the words for it."""
    default, type_ = getattr(PRESETS[GLYPHS], name), get_type_hints(Config)[name]
    if type_ is bool:
        words, value = [flag(f"no_{name}" if default else name)], not default
    else:
        value = TEXTS.get(name)
        if value is None and isinstance(default, str):
            value = next(choice for choice in get_args(type_) if choice != default)
        if value is None and float in (type_, *get_args(type_)):
            value = (default or 1.0) / 2
        if value is None:
            value = (default or 1) + 1
        words = [flag(name), str(value)]
    words += EXTRA.get(name, "").split()
    if needs := FACTS[name].read_with:
        words += [flag(needs[0]), needs[1]]
    for kind in registry.KINDS:
        readers = [each.name for each in registry.known(kind).values() if name in each.reads]
        reads = registry.find(kind, getattr(PRESETS[GLYPHS], kind)).reads
        if readers and name not in reads and flag(kind) not in words:
            words += [flag(kind), readers[-1]]
    return words, value


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
    return output.getvalue()


@pytest.mark.parametrize("name", FLAGS)
def test_flag_parses_and_help_explains_it(name: str, help_text: str) -> None:
    words, value = another(name)
    before, after = PRESETS[GLYPHS], parse([GLYPHS, *words])
    assert (getattr(after, name), type(getattr(after, name))) == (value, type(value))
    assert getattr(before, name) != value
    touched = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    for other in (*FLAGS, *NOT_FLAGS):
        if other != name and other not in touched:
            assert getattr(after, other) == getattr(before, other)
    options = re.split(r"\n\s*(?=-)", help_text)
    (block,) = [each for each in options if re.match(rf"{re.escape(flag(name))}[\s,]", each)]
    said = re.sub(r"--\S+|\{[^}]*\}\S*|\(default.*", "", block, flags=re.DOTALL)
    assert len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\b(INT|FLOAT|STR)\b", "", said))) >= 2, block


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
    parse([*given, "--data", few_shot, "--network", "lenet", "--learner", "supervised"])


def test_what_a_preset_is_called_is_no_flag() -> None:
    for name in NOT_FLAGS:
        with pytest.raises(UserError, match=f"{flag(name)}"):
            parse([GLYPHS, flag(name), "0.5"])


def test_contract_has_flags_and_choices(help_text: str) -> None:
    assert set(CONTRACT) <= set(map(flag, FLAGS))
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
    for name, readers in {"proximal": "imaml", "ps_max_staleness": "async"}.items():
        assert re.search(rf"{flag(name)}( \S+)?\s+{readers}: [A-Z]", help_text), name


def test_help_may_be_cut_short() -> None:
    command = "train_maml.py --help"
    done = run(["bash", "-c", f"set -o pipefail; {sys.executable} {command} | true"], timeout=60)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--iterations", "1e3"], "iterations", 1000),
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
    text = re.sub(r"\s+", " ", done.stdout)
    assert re.search(r"--ways INT [^(]*\(default: 20\)", text)
    own, others = text.split("other learners, networks, data sets and strategies:")
    assert "--omniglot-split" in own and "--proximal" in others


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MAML_DATA": "here/data"}, f"{os.getcwd()}/here/data"),
        ({"MAML_DATA": "~/data", "HOME": "/some/home"}, "/some/home/data"),
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


def test_data_root_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.yaml keeps it, and is read from other folders."""
    monkeypatch.setenv("HOME", "/some/home")
    monkeypatch.chdir(tmp_path)
    for spelled, found in {"data": f"{tmp_path}/data", "~/data": "/some/home/data"}.items():
        assert parse([GLYPHS, "--data-root", spelled]).data_root == found


# ---- bad input, told before anything is opened ------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "PRESET"),
        ("maml-glyph-5way-1shot", "did you mean maml-glyphs-5way-1shot?"),
        ("nonsense", "'nonsense'.*--presets"),
        ("--ways 5", "--ways: the PRESET comes before the flags"),
        ("--config", "--config: needs"),
        ("--config=/no/where", "/no/where: No such file"),
        (f"{GLYPHS} --ways 1", "--ways 1: .* give 2 or more"),
        (f"{GLYPHS} --nonsense 1", "--nonsense"),
        (f"{GLYPHS} --lr 1", "--lr: did you mean --inner-lr or --meta-lr"),
        (f"{GLYPHS} --inner-step=1", "--inner-step=1: did you mean --inner-steps"),
        (f"{GLYPHS} stray", "stray"),
        (f"{GLYPHS} --ways", "--ways"),
        (f"{GLYPHS} --ways 2.5", "--ways.*'2.5'"),
        (f"{GLYPHS} --inner-lr fast", "--inner-lr.*'fast'"),
        (f"{GLYPHS} --order third", "--order.*'second', 'first'"),
        (f"{GLYPHS} --strategy magic", "--strategy"),
        (f"{GLYPHS} --compile on --kernels native", "--compile on.*--kernels native"),
        (f"{GLYPHS} --data imagenet", "--data imagenet: .*miniimagenet"),
        (f"{GLYPHS} --network my_file.py:Net", "--network my_file.py:Net: write my_file:Net, "),
        (f"{GLYPHS} --learner mamml", "--learner mamml: .*did you mean maml"),
        (f"{GLYPHS} --transductive perhaps", "perhaps"),
        (f"{GLYPHS} --network mlp", "--network mlp.*--data glyphs"),
        (f"{SINUSOID} --network conv4", "--network conv4.*--data sinusoid"),
        (f"{SINUSOID} --ways 7", "--ways 7: --data sinusoid has no classes"),
        (f"{GLYPHS} --epochs 3", "--epochs 3: .*--iterations"),
        (f"{SUPERVISED} --epochs 1 --iterations 6", "--epochs 1 and --iterations 6: "),
        (f"{GLYPHS} --data mnist", "--data mnist: --learner maml .*--learner supervised"),
        (f"{SUPERVISED} --kernels native", "--kernels native: .*inner loop"),
        (f"{SUPERVISED} --inner-lr 3.0", "--inner-lr 3.0 is not for --learner supervised, but for"),
        (f"{GLYPHS} --ps-mode async", "--ps-mode async is not for --strategy auto, but for param-"),
        (
            f"{GLYPHS} --strategy param-server --ps-max-staleness 3",
            "--ps-max-staleness 3.*--ps-mode async",
        ),
        (f"{GLYPHS} --keep-best 3 --eval-every 0", "--eval-every 0: --keep-best 3 keeps"),
        (f"{GLYPHS} --test-model best --eval-every 0", "--eval-every 0: --test-model best tests"),
        (f"{GLYPHS} --learner protonet --head-init normal", ": --learner protonet takes the"),
        (
            f"{GLYPHS} --meta-momentum 0.5",
            "--meta-momentum 0.5 is for --meta-optimizer sgd, not",
        ),
        (f"{GLYPHS} --meta-lr-end 0.5", "--meta-lr-end 0.5 is for --meta-schedule linear or co"),
        (f"{GLYPHS} --learner metasgd --inner-steps 0", "--inner-steps 0.*metasgd"),
        (f"{GLYPHS} --learner imaml --proximal 0", "--proximal must be positive"),
        (f"{GLYPHS} --learner imaml --cg-damping nan", "--cg-damping must be at least 0"),
        (f"{GLYPHS} --learner imaml --meta-gradient reverse", "reverse: .*imaml is implicit"),
        (f"{GLYPHS} --meta-optimizer sgd --meta-momentum 1", "--meta-momentum must be below 1"),
        (f"{GLYPHS} --inner-lr inf", "--inner-lr must be positive and finite, not inf"),
        (f"{GLYPHS} --shots 0", "--shots must be at least 1, not 0"),
        (f"{GLYPHS} --shots {2**31}", "--shots must be at most 2147483647, not 2147483648$"),
        (f"{GLYPHS} --seed {2**63}", "--seed must be at most 9223372036854775807, not"),
        (f"{GLYPHS} --run-dir=", r'^--run-dir "": empty; was a shell variable not set\?$'),
        (f"{GLYPHS} --threads {2**20}", f"--threads must be at most .*not {2**20}"),
    ],
)
def test_bad_flags(words: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(words.split())
    message = str(caught.value)
    assert re.search(says, message), message
    assert len(message.splitlines()) == 1


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
        ("--device cuda:3", r"--device cuda:3: .*GPU"),
        ("--device nonsense", r"--device nonsense"),
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
        ("--batch-size 201", r"--batch-size 201: the validation split has only 200 examples"),
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


def test_run_dir_that_cannot_be(tmp_path: Path, mistake: Callable[..., str]) -> None:
    path = tmp_path / "here"
    path.write_text("a file\n")
    message = mistake(SINUSOID, "--run-dir", f"{path}/run")
    assert message.startswith(f"--run-dir {path}/run: ") and message.endswith("Not a directory")
    assert path.read_text() == "a file\n"


def test_folder_of_nobody(mistake: Callable[..., str]) -> None:
    assert mistake(SINUSOID, "--run-dir", "~no-such-user/x").startswith("--run-dir ~no-such-user/x")


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
