"""Models on the Hugging Face Hub, by its own mixin, with a model card made of the run's record."""

from pathlib import Path
from typing import Any

from huggingface_hub import (
    EvalResult,
    ModelCard,
    ModelCardData,
    ModelHubMixin,
    hf_hub_download,
)

from maml.config.presets import title
from maml.run.files import RECORD, RESULT, read_json

FILE = "model.safetensors"
CARD = """---
{data}
---

# {name}

{what}

```python
import maml

{code}
```
{results}"""


class OnHub(  # type: ignore[call-arg,unused-ignore]
    ModelHubMixin, library_name="maml", tags=["meta-learning", "few-shot-learning"]
):
    """A learner, a `maml.library.saving.Saved`, as the hub's mixin saves and loads it."""

    def __init__(
        self, held: Any, file: Path | None = None, arguments: dict[str, Any] | None = None
    ) -> None:
        """``file``, ``arguments``: where one is that was loaded, and what else `maml.load` gets."""
        self.held, self.file, self.arguments = held, file, arguments or {}

    def _save_pretrained(self, save_directory: Path) -> None:
        self.held.save(save_directory / FILE)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: Any, cache_dir: Any, force_download: bool,
        local_files_only: bool, token: Any, **arguments: Any,
    ) -> "OnHub":  # fmt: skip
        if Path(model_id).is_dir():
            return cls(None, Path(model_id) / FILE, arguments)
        file = hf_hub_download(
            model_id, FILE, revision=revision, cache_dir=cache_dir, token=token,
            force_download=force_download, local_files_only=local_files_only,
        )  # fmt: skip
        return cls(None, Path(file), arguments)

    def generate_model_card(self, *_: Any, repo: str = "USER/NAME", **fields: Any) -> ModelCard:
        """Return the card; ``fields`` are further ones of its metadata, as ``license``."""
        about, run_dir = self.held.about(), getattr(self.held, "run_dir", None)
        result = read_json(run_dir / "result.json", RESULT) if run_dir else {}
        data = ModelCardData(**self._hub_mixin_info.model_card_data.to_dict() | fields)
        if "learner" in about:
            name = str(about["learner"])
            flags = ", ".join(f"{n}={v!r}" for n, v in about["flags"].items() if v is not None)
            what = f"A `maml.{name}` around a module of its author's, with {flags}."
            more = "".join(f", {each}={each}" for each in self.held.given)
            code = f'learner = maml.from_pretrained("{repo}", module=net{more})'
        else:
            config = self.held.learner.config
            name = title(config)
            what = f"{config.learner} on {config.data}, after {about['iteration']:,} iterations."
            code = f'model = maml.from_pretrained("{repo}")\n'
            code += "model.adapt(support_x, support_y).predict(query_x)"
        if isinstance(result.get("accuracy"), float):
            data.model_name = name
            data.eval_results = [
                EvalResult(
                    task_type="image-classification", dataset_type=config.data,
                    dataset_name=f"{config.data}, {config.ways}-way {config.shots}-shot",
                    metric_type="accuracy", metric_value=round(100 * result["accuracy"], 2),
                )
            ]  # fmt: skip
        text = CARD.format(
            data=data.to_yaml(), name=name, what=what, code=code,
            results=_results(result, run_dir) if result and run_dir else "",
        )  # fmt: skip
        return ModelCard(text)


def _results(result: dict[str, Any], run_dir: Path) -> str:
    """Return the test's results, and how the model was made, as its run or record says."""
    lines = [f"\n## Test on {result['tasks']:,} tasks\n\n| metric | mean | ± 95 % |\n|---|---|---|"]
    for name, value in result.items():
        again = name.startswith("transductive_")  # the headline's, under another name
        if isinstance(value, float) and f"{name}_ci95" in result and not again:
            width = result[f"{name}_ci95"]
            lines.append(f"| {name} | {value:.4f} | {'–' if width is None else f'{width:.4f}'} |")
    published = result.get("claim") or result.get("published")
    lines += ["", f"Published: {published} ({result.get('source')})."] if published else []
    record = read_json(run_dir / "record.json", RECORD)
    if record:
        made = record["hardware"]
        versions = ", ".join(f"{n} {v}" for n, v in made.get("versions", {}).items())
        lines += [
            "", "## How it was made", "", f"    {record.get('command')}", "",
            f"{record['minutes']:.0f} minutes on {made['processor']}, {made['date']}; {versions}; "
            f"commit {record['starts'][-1].get('git_commit')}.",
        ]  # fmt: skip
    return "\n".join([*lines, ""])
