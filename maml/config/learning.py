"""The flags of what learns and from what: the learner and its network, the data, the outer loop."""

from dataclasses import dataclass
from typing import Literal

from datasets import paths
from maml.config import registry
from maml.config.flags import HOST, RESULT, WAY, flag
from maml.errors import UserError


@dataclass(frozen=True)
class Learner:
    """The learner and the network."""

    learner: str = flag("maml", "The learner: its inner problem and outer loss.")
    network: str = flag("conv4", "The network: from examples to outputs.")
    inner_lr: float = flag(
        0.4, "Inner-loop rate, on the mean support loss; metasgd: to begin with.", above=0
    )
    inner_steps: int = flag(
        1, "Inner-loop steps while training; without --eval-inner-steps also at test.", least=0
    )
    eval_inner_steps: int = flag(
        3, "Inner-loop steps at validation and test.", RESULT, least=0, chooses=True
    )
    inner_optimizer: Literal["sgd", "momentum", "adam", "adamw", "adam0"] = flag(
        "sgd", "Inner-loop optimizer, differentiated through; adam0: Adam with β1 = 0."
    )
    order: Literal["second", "first"] = flag(
        "second", "Meta-gradient: second differentiates through the inner gradients."
    )
    adapt: str | None = flag(
        None,
        "Which parameters the inner loop adapts: PATTERN[=RATE],…. A pattern is a name, with * for "
        "any text, or @head, @body, @norm. RATE multiplies --inner-lr [all; anil: @head, boil: "
        "@body, mamlpp: *,@norm=0].",
    )  # fmt: skip
    discount: float = flag(
        0.99, "Discount of a reward for each step that it comes later.", least=0, most=1
    )
    meta_gradient: Literal["auto", "reverse", "mixed"] = flag(
        "auto", "reverse: through all steps; mixed: forward over reverse [mixed with kernels].", WAY
    )
    kernels: Literal["auto", "native", "torch"] = flag(
        "auto", "Derivatives: native (compiled on first use) or torch [native where it can].", WAY
    )
    batching: Literal["auto", "vmap", "tasks"] = flag(
        "auto",
        "Without native kernels: vmap: all tasks at once; tasks: each in a thread, as a plain "
        "loop [vmap where both agree and each task is little work].", WAY,
    )  # fmt: skip
    compile: Literal["auto", "off", "on"] = flag(
        "auto",
        "on: compile what kernels do not serve; auto: in long runs on a CPU, if tasks are batched.",
        WAY,
    )
    dtype: Literal["float32", "float64"] = flag(
        "float32", "Floating-point type of weights, images and gradients."
    )

    # Of MAML and of learners like it.
    label_smoothing: float = flag(
        0.0,
        "Share of each label that is divided among all classes, in both loops; the losses of "
        "validation and test have none.", least=0, most=1,
    )  # fmt: skip

    # Of CAVIA.
    context: int = flag(100, "Size of the context, which is all that adapts.", least=1)

    # Of iMAML.
    proximal: float = flag(
        2.0, "Strength λ of the pull that the initial weights exert on the adapted ones.", above=0
    )
    cg_steps: int = flag(5, "Steps of conjugate gradient for each task's meta-gradient.", least=0)
    cg_damping: float = flag(
        0.0, "Damping δ: conjugate gradient solves (1 + δ) I + H/λ; 0: the paper's equation.",
        least=0,
    )  # fmt: skip
    cg_lambda: float | None = flag(
        None, "Divisor of the Hessian in conjugate gradient, for λ [--proximal].", above=0
    )
    pull: Literal["each-step", "end"] = flag(
        "each-step", "When the initial weights pull: with each inner step, or once, after."
    )
    eval_proximal: float | None = flag(
        None, "λ at validation and test, where it pulls with each step [--proximal].", RESULT,
        least=0, chooses=True,
    )  # fmt: skip

    # Of MAML++.
    lslr: bool = flag(True, "Learn an inner rate for each tensor and step, from --inner-lr on.")
    per_step_norm: bool = flag(True, "Learn the batch norms' scale and shift for each inner step.")
    msl_epochs: int = flag(
        10,
        "First epochs: query losses of all steps count, less with each epoch; 0: only the last.",
        least=0,
    )
    first_order_epochs: int = flag(
        0, "Epochs of first-order meta-gradients to begin with.", least=0
    )
    iterations_per_epoch: int = flag(
        500, "Iterations that --msl-epochs and --first-order-epochs count as an epoch.", least=1
    )

    # Of Reptile.
    inner_batch: int | None = flag(
        None, "Support examples of an inner step while training [all].", least=1
    )
    eval_inner_batch: int | None = flag(
        None, "The same at validation and test [all].", RESULT, least=1, chooses=True
    )
    keep_moment: bool = flag(
        False,
        "Learn Adam's second moment, with which each task begins. Without the flag each task "
        "begins with none.", read_with=("inner_optimizer", "adam0"),
    )  # fmt: skip

    # Of supervised training.
    epochs: int | None = flag(
        None, "Passes over the training examples, in place of --iterations.", RESULT, least=1
    )

    # Of the four-block networks.
    filters: int = flag(
        64,
        "Channels of each of the network's convolutions; compiled kernels need a multiple of the "
        "processor's vector: 8, or 16 with AVX-512 (in float64 half of that).", least=1,
    )  # fmt: skip
    leak: float = flag(
        0.0,
        "Slope of the networks' activations below zero: 0 is ReLU, MAML++'s leaky ReLU has 0.01.",
        least=0, below=1,
    )  # fmt: skip
    norm_eps: float = flag(1e-3, "Added to the variance by batch normalisation.", above=0)
    head_init: Literal["small", "normal", "xavier"] = flag(
        "small",
        "Initial weights of the output layer: normal with σ 0.01, N(0, 1), or Xavier's uniform.",
    )

    def check(self) -> None:
        """Refuse values that cannot work together."""
        if self.kernels == "native" and self.compile == "on":
            raise UserError("--compile on: with --kernels native nothing is left to compile")
        if self.epochs is not None and registry.learner(self.learner).tasks != "batches":
            raise UserError(
                f"--epochs {self.epochs}: --learner {self.learner} learns from tasks, which never "
                "end; give --iterations"
            )


@dataclass(frozen=True)
class Data:
    """The data."""

    data: str = flag("glyphs", "Data set.")
    data_root: str = flag(
        lambda: str(paths.default_data_root()),
        "Folder that holds the data sets [$MAML_DATA, then ~/.cache/maml]; folder: of your images, "
        "as train/CLASS/*, validation/CLASS/* and test/CLASS/*, or CLASS/* alone.", HOST,
    )  # fmt: skip
    ways: int = flag(5, "Classes a task; supervised: classes in all.", least=1)
    shots: int = flag(1, "Support examples per class.", least=1)
    train_ways: int | None = flag(
        None, "Classes a task while training, if another number [--ways].", least=1
    )
    train_shots: int | None = flag(
        None, "Support examples a class in training, if it differs [--shots].", least=1
    )
    queries: int = flag(1, "Query examples per class while training.", least=1)
    eval_queries: int = flag(
        1, "Query examples per class at validation and test.", RESULT, least=1, chooses=True
    )
    horizon: int = flag(200, "Steps that an episode of acting takes at most.", least=1)
    batch_size: int = flag(64, "Examples of a mini-batch, which is a task.", least=1)

    # Of folders of images.
    image_size: int = flag(
        84, "Width and height of the images; the shorter side is resized, the longer one cut.",
        least=1,
    )  # fmt: skip
    image_mode: Literal["rgb", "grey"] = flag("rgb", "Colour or grey.")
    split_fractions: str = flag(
        "0.64,0.16,0.2",
        "Fractions of the classes for train, validation and test, if the folder is not divided.",
    )

    # Of Omniglot.
    omniglot_split: Literal["maml", "mamlpp", "vinyals", "vinyals-trainval"] = flag(
        "maml",
        "Which named split of Omniglot's classes: 1100/100/423, 1150/50/423, 1028/172/423, or "
        "1200/172/423, where the classes of validation train, too.",
    )

    def check(self) -> None:
        """Refuse values that cannot work together."""
        data = registry.data_set(self.data)
        # We do not know whether the targets of a user's own data set are classes.
        classes = data.classifies and not data.environments
        if classes and 1 in (self.ways, self.train_ways):
            name = "--ways" if self.ways == 1 else "--train-ways"
            raise UserError(f"{name} 1: of one class, every answer is right; give 2 or more")


@dataclass(frozen=True)
class OuterLoop(Learner):
    """The outer loop."""

    seed: int = flag(
        0, "Seed of all that is random: weights, tasks, images.", least=0, most=2**63 - 1
    )
    init: str | None = flag(
        None, "Weights to begin with, of a run, record, checkpoint or state_dict [drawn by --seed]."
    )
    iterations: int = flag(
        1000, "Outer steps in all, a resumed run's earlier ones included.", RESULT,
        least=0, read_with=("epochs", None),
    )  # fmt: skip
    meta_batch_size: int = flag(32, "Tasks per iteration, over all workers.", least=1)
    meta_lr: float = flag(1e-3, "Learning rate of the outer loop.", above=0)
    meta_optimizer: Literal["adam", "sgd"] = flag("adam", "Optimizer of the outer loop.")
    meta_schedule: Literal["constant", "linear", "cosine", "halving"] = flag(
        "constant", "How --meta-lr falls to --meta-lr-end over the run, or halves."
    )
    meta_lr_end: float = flag(
        0.0, "linear, cosine: what --meta-lr falls to.",
        least=0, read_with=("meta_schedule", "linear", "cosine"),
    )  # fmt: skip
    meta_halve_every: int = flag(
        2000, "Iterations after which --meta-lr halves, again and again.",
        least=1, read_with=("meta_schedule", "halving"),
    )  # fmt: skip
    meta_decay: float = flag(
        0.5, "Factor of --meta-lr after each --meta-halve-every.",
        above=0, most=1, read_with=("meta_schedule", "halving"),
    )  # fmt: skip
    meta_eps: float = flag(
        1e-8, "ε of the outer loop's Adam, added to √v.",
        above=0, read_with=("meta_optimizer", "adam"),
    )  # fmt: skip
    meta_momentum: float = flag(
        0.0, "sgd: momentum of the outer loop.",
        least=0, below=1, read_with=("meta_optimizer", "sgd"),
    )  # fmt: skip
    grad_clip: float | None = flag(
        None, "Clip every element of the meta-gradient to this magnitude.", above=0
    )
    grad_clip_norm: float | None = flag(
        None, "Shrink a meta-gradient whose norm is larger to this norm.", above=0
    )
    weight_decay: float = flag(
        0.0, "An outer step shrinks weights by this, times its rate (AdamW).", least=0
    )
    freeze: str | None = flag(
        None, "Parameters that neither adapt nor learn: patterns, as for --adapt."
    )
    on_nonfinite: Literal["stop", "skip"] = flag(
        "stop", "After a step that is not finite, and so not taken: stop, or go on.", RESULT
    )

    def check(self) -> None:
        """Refuse values that cannot work together."""
        if not (self.keep_moment and self.inner_optimizer == "adam0"):
            return
        steps = max(self.meta_lr, self.meta_lr_end)
        clips = self.grad_clip or self.grad_clip_norm
        other = self.meta_optimizer != "sgd" or self.meta_momentum or steps > 1 or clips
        if other and registry.is_read("keep_moment", self):
            raise UserError(
                "--keep-moment: its moves are weighted means, so it needs --meta-optimizer sgd "
                "without --meta-momentum and clipping, and --meta-lr 1 or less; or give "
                "--no-keep-moment"
            )
