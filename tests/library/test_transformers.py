"""Models of Hugging Face's transformers and PEFT, tiny and random, against a plain loop."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import maml
from tests.library.own_networks import by_loop

of = pytest.importorskip("transformers", reason="needs transformers (requirements.txt)")
peft = pytest.importorskip("peft", reason="needs peft (requirements.txt)")
of.logging.set_verbosity_error()

WORDS, LENGTH, SIZE, STEPS, LR = 20, 6, 8, 2, 0.1
ENDS = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
BODY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
DECODER = {**BODY, **ENDS, "num_key_value_heads": 1, "max_position_embeddings": 16}
PICTURES = {"image_size": SIZE, "num_labels": 3}
BERT = {
    "vocab_size": WORDS, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
    "num_labels": 3,
}  # fmt: skip


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return of.GPT2LMHeadModel(of.GPT2Config(n_layer=2, n_embd=8, n_head=2, **ENDS, **off))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "gpt2": (gpt2, 1e-10),
    # The code of these goes through float32.
    "llama": (lambda: of.LlamaForCausalLM(of.LlamaConfig(**DECODER)), 1e-6),
    "qwen3": (lambda: of.Qwen3ForCausalLM(of.Qwen3Config(**DECODER, head_dim=4)), 1e-6),
    "mistral": (
        lambda: of.MistralForCausalLM(of.MistralConfig(**DECODER, sliding_window=3)), 1e-6
    ),
    "mamba": (lambda: of.MambaForCausalLM(
        of.MambaConfig(hidden_size=8, num_hidden_layers=1, state_size=3, pad_token_id=0, **ENDS)
    ), 1e-6),
    "bert": (lambda: of.BertForSequenceClassification(of.BertConfig(**BODY, **BERT)), 1e-10),
    "distilbert": (lambda: of.DistilBertForSequenceClassification(of.DistilBertConfig(
        dim=8, n_layers=1, n_heads=2, hidden_dim=8, vocab_size=WORDS, dropout=0,
        attention_dropout=0, seq_classif_dropout=0, num_labels=3
    )), 1e-10),
    "vit": (lambda: of.ViTForImageClassification(
        of.ViTConfig(**BODY, **PICTURES, patch_size=4)
    ), 1e-10),
    "convnext": (lambda: of.ConvNextForImageClassification(
        of.ConvNextConfig(**PICTURES, hidden_sizes=[4, 4], depths=[1, 1], num_stages=2,
                          patch_size=2)
    ), 1e-10),
}  # fmt: skip


def examples(name: str, labels: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs by name and targets; the first two of four texts end early."""
    y = torch.arange(4) % 3
    if name in ("vit", "convnext"):
        return {"pixel_values": torch.randn(4, 3, SIZE, SIZE, dtype=torch.float64)}, y
    ids, mask = torch.randint(1, WORDS, (4, LENGTH)), torch.ones(4, LENGTH, dtype=torch.int64)
    mask[:2, -2:] = 0
    y = y if "bert" in name else ids
    more = {"labels": ids.masked_fill(mask == 0, -100)} if labels else {}
    return {"input_ids": ids, "attention_mask": mask, **more}, y


def of_answers(answers: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(answers.logits.flatten(0, -2), y.flatten())


def of_model(answers: Any, y: Tensor) -> Tensor:
    return answers.loss


def check(
    network: nn.Module, plain: nn.Module, tasks: Any, loss: Any, within: float, **flags: Any
) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected, gradients = by_loop(plain, tasks, STEPS, LR, loss)
    learner = maml.MAML(network, inner_lr=LR, inner_steps=STEPS, loss=loss, **flags)
    found = learner(tasks)
    found.backward()
    torch.testing.assert_close(found.double(), expected.double(), rtol=within, atol=0)
    learned = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
    difference = torch.cat(learned) - torch.cat([g.flatten() for g in gradients])
    assert difference.norm() <= within * torch.cat(learned).norm()
    # It is called as the model is, and returns what the model returns.
    fast = learner.adapt(*tasks[0][:2])
    answers = fast(**tasks[0][2])
    assert type(answers) is type(plain(**tasks[0][2])) and answers.logits.requires_grad
    assert learner.evaluate(tasks)["loss"].shape == (2,)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_a_plain_loop(name: str) -> None:
    make, within = FAMILIES[name]
    torch.manual_seed(0)
    network = make().double()
    tasks = [(*examples(name), *examples(name)) for _ in range(2)]
    check(network, copy.deepcopy(network), tasks, of_answers, within)


@pytest.mark.parametrize("again", [False, True])
def test_lora_by_the_model_s_own_loss(again: bool) -> None:
    """With ``labels=``, whose loss is of float32; ``again``: blocks are checkpoints."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True,
        init_lora_weights=False,
    )  # fmt: skip
    network = peft.get_peft_model(gpt2(), config).double()
    plain = copy.deepcopy(network)
    if again:
        network.base_model.model.activation_checkpointing_enable()
    tasks = [(*examples("gpt2", True), *examples("gpt2", True)) for _ in range(2)]
    check(network, plain, tasks, of_model, 1e-6, adapt="*lora_*")
