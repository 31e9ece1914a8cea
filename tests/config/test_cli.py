"""The command line: every flag parses, and every mistake is one line that names it."""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from datasets.paths import default_data_root
from maml.__main__ import PROGRAMS
from maml.__main__ import main as program
from maml.config import FLAGS, Config, flag, registry
from maml.config.cli import parse
from maml.config.fields import FACTS
from maml.config.presets import PRESETS, changed, spelled, with_values
from maml.errors import UserError
from maml.processes.program import run_program
from tests.launching import run, torchrun
from tests.runs import as_flags, refused

GLYPHS = "maml-glyphs-5way-1shot"
SINUSOID = "maml-sinusoid-10shot"
SUPERVISED = "supervised-glyphs-lenet"
FIRST_USE = r"(drawing|decoding|reading|downloading|compiling|waiting for) "

# Values for flags whose values are texts, and further flags that some flags need.
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
    **dict.fromkeys(
        ("batched_inference", "batch_wait"), f"--strategy observers {ACTING} reinforce"
    ),
}


def another(name: str) -> tuple[list[str], Any]:
    """Return the words that give a flag another value than the preset's, and that value."""
    default, facts = getattr(PRESETS[GLYPHS], name), FACTS[name]
    if facts.type is bool:
        words, value = [flag(f"no_{name}" if default else name)], not default
    else:
        value = TEXTS.get(name)
        if value is None and isinstance(default, str):
            value = next(choice for choice in facts.choices if choice != default)
        if value is None and facts.type is float:
            value = (default or 1.0) / 2
        if value is None:
            value = (default or 1) + 1
        words = [flag(name), str(value)]
    words += EXTRA.get(name, "").split()
    if needs := facts.read_with:
        words += [flag(needs[0]), str(needs[1])]
    for kind in registry.KINDS:
        readers = [each.name for each in registry.known(kind).values() if name in each.reads]
        reads = registry.find(kind, getattr(PRESETS[GLYPHS], kind)).reads
        if readers and name not in reads and flag(kind) not in words:
            words += [flag(kind), readers[-1]]
    return words, value


# The contract: these flags must exist under these names.
CONTRACT = """
    --seed --data-root --run-dir --iterations --meta-batch-size --ways --shots --queries --inner-lr
    --inner-steps --eval-inner-steps --inner-optimizer --meta-lr --order --strategy --partition
    --eval-every --eval-tasks --checkpoint-every --resume --logger --dtype --device
"""


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
    if name == "inner_steps":  # tests follow the training
        touched.add("eval_inner_steps")
        assert after.eval_inner_steps == value
        for config in (after, with_values(after, eval_inner_steps=before.eval_inner_steps)):
            assert parse([GLYPHS, *shlex.split(spelled(changed(config)))]) == config
    for other in vars(after):
        if other != name and other not in touched:
            assert getattr(after, other) == getattr(before, other)
    options = re.split(r"\n\s*(?=-)", help_text)
    (block,) = [each for each in options if re.match(rf"{re.escape(flag(name))}[\s,]", each)]
    said = re.sub(r"--\S+|\{[^}]*\}\S*|\(default.*", "", block, flags=re.DOTALL)
    assert len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\b(INT|FLOAT|STR)\b", "", said))) >= 2, block


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_sets_is_not_given(name: str) -> None:
    """A preset parses spelled out, too, and with another network, data set or learner."""
    preset = PRESETS[name]
    assert parse([name]) == preset
    assert parse(as_flags(preset)) == preset
    known = registry.data_set(preset.data)
    few_shot = preset.data if {"episodes", "batches"} <= {*known.tasks} else "glyphs"
    # A function has one way; classification needs several.
    given = [name, "--ways", "5"] if preset.ways == 1 else [name]
    parse([*given, "--data", "miniimagenet", "--network", "conv4-pool", "--learner", "maml"])
    parse([*given, "--data", few_shot, "--network", "lenet", "--learner", "supervised"])


def test_help_has_groups_and_lists_components(help_text: str) -> None:
    assert set(CONTRACT.split()) <= set(map(flag, FLAGS))
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


def test_presets_are_listed_and_have_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A preset's help shows its own values, and begins with the flags that it reads."""
    said = []
    for words in (["--presets"], ["maml-omniglot-20way-5shot", "--help"]):
        with pytest.raises(SystemExit) as stop:
            parse(words)
        assert stop.value.code == 0
        said.append(capsys.readouterr().out)
    assert set(PRESETS) <= set(said[0].split())
    text = re.sub(r"\s+", " ", said[1])
    assert re.search(r"--ways INT [^(]*\(default: 20\)", text)
    own, others = text.split("other learners, networks, data sets and strategies:")
    assert "--omniglot-split" in own and "--proximal" in others


def test_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is absolute, because config.yaml is read from other folders, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/some/home")
    for data, default in {
        "here/data": f"{tmp_path}/here/data", "~/data": "/some/home/data",
        "": "/some/home/.cache/maml",
    }.items():  # fmt: skip
        monkeypatch.setenv("MAML_DATA", data)
        assert Config().data_root == str(default_data_root()) == default
    for given, found in {"data": f"{tmp_path}/data", "~/data": "/some/home/data"}.items():
        assert parse([GLYPHS, "--data-root", given]).data_root == found


# ---- bad input that is found before anything is opened ----------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "PRESET"),
        ("maml-glyph-5way-1shot", "did you mean maml-glyphs-5way-1shot?"),
        ("--ways 5", "--ways: the PRESET comes before the flags"),
        ("--config", "--config: needs"),
        (f"{GLYPHS} --ways 1", "--ways 1: .* give 2 or more"),
        (f"{GLYPHS} --nonsense 1", "--nonsense"),
        (f"{GLYPHS} --published 0.5", "--published"),
        (f"{GLYPHS} --lr 1", "--lr: did you mean --inner-lr or --meta-lr"),
        (f"{GLYPHS} --meta-batch 4", "--meta-batch: did you mean --meta-batch-size"),
        (f"{GLYPHS} --outer-lr 1", "--outer-lr: did you mean --meta-lr"),
        (f"{GLYPHS} --first-order", "--first-order: did you mean --order first"),
        (f"{GLYPHS} --iters 3", "--iters: did you mean --iterations"),
        (f"{GLYPHS} --epochs 4", "--epochs 4: --learner maml .*; give --iterations$"),
        (f"{GLYPHS} stray", "stray"),
        (f"{GLYPHS} --ways", "--ways"),
        (f"{GLYPHS} --ways 2.5", "--ways.*'2.5'"),
        (f"{GLYPHS} --ways=--", "^--ways=--: -- is no value"),
        (f"{GLYPHS} --data={300 * 'x'}", "^--data x+: unknown; "),
        (f"{GLYPHS} --order third", "--order: invalid choice: 'third' .*second'?, '?first"),
        (f"{GLYPHS} --compile on --kernels native", "--compile on.*--kernels native"),
        (f"{GLYPHS} --network my_file.py:Net", "--network my_file.py:Net: write my_file:Net, "),
        (f"{GLYPHS} --learner mamml", "--learner mamml: .*did you mean maml"),
        (f"{SINUSOID} --network conv4", "--network conv4.*--data sinusoid"),
        (f"{SINUSOID} --ways 7", "--ways 7: --data sinusoid has no classes"),
        (f"{SUPERVISED} --epochs 1 --iterations 6", "--iterations 6 is for --epochs None, not 1"),
        (f"{GLYPHS} --data mnist", "--data mnist: has no .*--learner supervised"),
        (f"{GLYPHS} --ps-mode async", "--ps-mode async is not for --strategy auto, but for param-"),
        (
            f"{GLYPHS} --strategy param-server --ps-max-staleness 3",
            "--ps-max-staleness 3.*--ps-mode async",
        ),
        (f"{GLYPHS} --keep-best 3 --eval-every 0", "--eval-every 0: .* --keep-best 3 has none"),
        (f"{GLYPHS} --learner protonet --head-init normal", ": --learner protonet takes the"),
        (f"{GLYPHS} --learner metasgd --inner-steps 0", "--inner-steps 0.*metasgd"),
        (f"{GLYPHS} --inner-lr inf", "--inner-lr must be positive and finite, not inf"),
        (f"{GLYPHS} --shots {2**31}", "--shots must be at most 2147483647, not 2147483648$"),
        (f"{GLYPHS} --run-dir=", r'^--run-dir "": empty; was a shell variable not set\?$'),
        (f"{GLYPHS} --threads {2**20}", f"--threads must be at most .*not {2**20}"),
    ],
)
def test_bad_flags(words: str, says: str) -> None:
    message = refused(parse, words.split())
    assert re.search(says, message), message


# ---- bad input that the whole program finds ---------------------------------------------------


@pytest.fixture
def mistake(tmp_path: Path, capfd: Any, monkeypatch: Any) -> Any:
    """Run the program here and return its only line on stderr, without ``error: ``."""
    import train_maml

    def call(*arguments: str) -> str:
        # If the program misses the mistake, the run stays short and outside the repository.
        words = [*arguments, "--iterations", "0", "--logger", "none", "--test-tasks", "1"]
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as stop:
            run_program(train_maml.main, words)
        said = capfd.readouterr().err.splitlines(keepends=True)
        # The first use of data prints that the data is drawn or decoded.
        err = "".join(line for line in said if not re.match(FIRST_USE, line))
        assert stop.value.code == 2, err
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        return err[len("error: ") : -1]

    return call


BAD_REQUESTS = {
    f"{GLYPHS} --ways 801": "--ways 801: the train split has only 800 classes",
    f"{GLYPHS} --ways 201 --eval-every 0": "--ways 201: the test split has only 200 classes",
    f"{GLYPHS} --shots 10 --queries 11": "--shots 10 and --queries 11.* 21 .* 20",
    f"{GLYPHS} --shots 1 --eval-queries 20": "--shots 1 and --eval-queries 20.* 21 .* 20",
    f"{GLYPHS} --device cuda:3": "--device cuda:3: .*GPU",
    f"{GLYPHS} --data omniglot --data-root /etc/passwd": "not downloaded .*Not a directory",
    f"{GLYPHS} --resume here.pt": "--resume here.pt: no such file",
    f"{GLYPHS} --strategy param-server": "param-server: needs 2 processes: ",
    f"{SUPERVISED} --batch-size 201": "--batch-size 201: the validation split has only 200",
    f"{SUPERVISED} --data mnist": "--ways 100: mnist has 10 classes; give --ways 10",
}


@pytest.mark.parametrize("words", BAD_REQUESTS)
def test_bad_requests(
    words: str, tmp_path: Path, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = mistake(*words.split(), "--run-dir", str(tmp_path / "run"))
    assert re.search(BAD_REQUESTS[words], message), message
    assert not (tmp_path / "run").exists()


def test_run_dir_that_cannot_be(tmp_path: Path, mistake: Any) -> None:
    file, locked = tmp_path / "here", tmp_path / "locked"
    file.write_text("a file\n")
    locked.mkdir(mode=0o500)
    # Root may write anywhere; /proc refuses even root.
    for path in (f"{file}/run", str(locked) if os.geteuid() else "/proc/self/run", "~no-such/x"):
        assert mistake(SINUSOID, "--run-dir", path).startswith(f"--run-dir {path}: ")
    assert mistake("--config", "~no-such/x").startswith("--config ~no-such/x: ")


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    def fail(arguments: list[str]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_program(fail, [])


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
    command = [*torchrun(2), *flags, "--logger", "none"]
    done = run(command, 90, expect=None, env={"MAML_CACHE": str(cache_dir)})
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {says}")
    # torchrun's own report ends with our line. Our part has no traceback.
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
