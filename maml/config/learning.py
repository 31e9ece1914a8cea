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

    learner: str = flag("maml")
    """The learner: its inner problem and outer loss."""
    network: str = flag("conv4")
    """The network: from examples to outputs."""
    inner_lr: float = flag(0.4, above=0)
    """Inner-loop rate, on the mean support loss; metasgd: to begin with."""
    inner_steps: int = flag(1, least=0)
    """Inner-loop steps while training; without --eval-inner-steps also at test."""
    eval_inner_steps: int = flag(3, RESULT, least=0, chooses=True)
    """Inner-loop steps at validation and test."""
    inner_optimizer: Literal["sgd", "momentum", "adam", "adamw", "adam0"] = flag("sgd")
    """Inner-loop optimizer, differentiated through; adam0: Adam with β1 = 0."""
    inner_momentum: float = flag(0.9, least=0, below=1, read_with=("inner_optimizer", "momentum"))
    """Its coefficient β: m' = β m + gradient."""
    order: Literal["second", "first"] = flag("second")
    """Meta-gradient: second differentiates through the inner gradients."""
    adapt: str | None = flag(None)
    """Parameters that the inner loop adapts: patterns, with commas. A pattern is the name of a
    parameter, where * stands for any text; or @head, @body or @norm. PATTERN=RATE multiplies
    --inner-lr by RATE for its parameters [all; anil: @head, boil: @body, mamlpp: *,@norm=0]."""
    discount: float = flag(0.99, least=0, most=1)
    """Discount of a reward for each step that it comes later."""
    meta_gradient: Literal["auto", "reverse", "mixed"] = flag("auto", WAY)
    """reverse: through all steps; mixed: forward over reverse [mixed with kernels]."""
    kernels: Literal["auto", "native", "torch"] = flag("auto", WAY)
    """Derivatives: native (compiled on first use) or torch [native where it can]."""
    batching: Literal["auto", "vmap", "tasks"] = flag("auto", WAY)
    """Without native kernels: vmap: all tasks at once; tasks: each in a thread, as a plain loop
    [vmap where both agree and each task is little work]."""
    compile: Literal["auto", "off", "on"] = flag("auto", WAY)
    """on: compile what kernels do not serve; auto: in long runs on a CPU, if tasks are batched."""
    dtype: Literal["float32", "float64"] = flag("float32")
    """Floating-point type of weights, images and gradients."""

    # Of MAML and of learners like it.
    label_smoothing: float = flag(0.0, least=0, most=1)
    """Share of each label that is divided among all classes, in both loops; the losses of
    validation and test have none."""

    # Of CAVIA.
    context: int = flag(100, least=1)
    """Size of the context, which is all that adapts."""

    # Of iMAML.
    proximal: float = flag(2.0, above=0)
    """Strength λ of the pull that the initial weights exert on the adapted ones."""
    cg_steps: int = flag(5, least=0)
    """Steps of conjugate gradient for each task's meta-gradient."""
    cg_damping: float = flag(0.0, least=0)
    """Damping δ: conjugate gradient solves (1 + δ) I + H/λ; 0: the paper's equation."""
    cg_lambda: float | None = flag(None, above=0)
    """Divisor of the Hessian in conjugate gradient, for λ [--proximal]."""
    pull: Literal["each-step", "end"] = flag("each-step")
    """When the initial weights pull: with each inner step, or once, after."""
    eval_proximal: float | None = flag(None, RESULT, least=0, chooses=True)
    """λ at validation and test, where it pulls with each step [--proximal]."""

    # Of MAML++.
    lslr: bool = flag(True)
    """Learn an inner rate for each tensor and step, from --inner-lr on."""
    per_step_norm: bool = flag(True)
    """Learn the batch norms' scale and shift for each inner step."""
    msl_epochs: int = flag(10, least=0)
    """First epochs: query losses of all steps count, less with each epoch; 0: only the last."""
    first_order_epochs: int = flag(0, least=0)
    """Epochs of first-order meta-gradients to begin with."""
    iterations_per_epoch: int = flag(500, least=1)
    """Iterations that --msl-epochs and --first-order-epochs count as an epoch."""

    # Of Reptile.
    inner_batch: int | None = flag(None, least=1)
    """Support examples of an inner step while training [all]."""
    eval_inner_batch: int | None = flag(None, RESULT, least=1, chooses=True)
    """The same at validation and test [all]."""
    keep_moment: bool = flag(False, read_with=("inner_optimizer", "adam0"))
    """Each task begins with a learned second moment of adam0 (without the flag: with zeros)."""

    # Of supervised training.
    epochs: int | None = flag(None, RESULT, least=1)
    """Passes over the training examples, in place of --iterations."""

    # Of the four-block networks.
    filters: int = flag(64, least=1)
    """Channels of each of the network's convolutions; compiled kernels need a multiple of the
    processor's vector: 8, or 16 with AVX-512 (in float64 half of that)."""
    leak: float = flag(0.0, least=0, below=1)
    """Slope of the networks' activations below zero: 0 is ReLU, MAML++'s leaky ReLU has 0.01."""
    norm_eps: float = flag(1e-3, above=0)
    """Added to the variance by batch normalisation."""
    head_init: Literal["small", "normal", "xavier"] = flag("small")
    """Initial weights of the output layer: normal with σ 0.01, N(0, 1), or Xavier's uniform."""

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

    data: str = flag("glyphs")
    """Data set."""
    data_root: str = flag(lambda: str(paths.default_data_root()), HOST)
    """Folder that holds the data sets [$MAML_DATA, then ~/.cache/maml]; folder: of your images, as
    train/CLASS/*, validation/CLASS/* and test/CLASS/*, or CLASS/* alone."""
    ways: int = flag(5, least=1)
    """Classes a task; supervised: classes in all."""
    shots: int = flag(1, least=1)
    """Support examples per class."""
    train_ways: int | None = flag(None, least=1)
    """Classes a task while training, if another number [--ways]."""
    train_shots: int | None = flag(None, least=1)
    """Support examples a class in training, if it differs [--shots]."""
    queries: int = flag(1, least=1)
    """Query examples per class while training."""
    eval_queries: int = flag(1, RESULT, least=1, chooses=True)
    """Query examples per class at validation and test."""
    horizon: int = flag(200, least=1)
    """Steps that an episode of acting takes at most."""
    batch_size: int = flag(64, least=1)
    """Examples of a mini-batch, which is a task."""

    # Of folders of images.
    image_size: int = flag(84, least=1)
    """Width and height of the images; the shorter side is resized, the longer one cut."""
    image_mode: Literal["rgb", "grey"] = flag("rgb")
    """Colour or grey."""
    split_fractions: str = flag("0.64,0.16,0.2")
    """Fractions of the classes for train, validation and test, if the folder is not divided."""

    # Of Omniglot.
    omniglot_split: Literal["maml", "mamlpp", "vinyals", "vinyals-trainval"] = flag("maml")
    """Which named split of Omniglot's classes: 1100/100/423, 1150/50/423, 1028/172/423, or
    1200/172/423, where the classes of validation train, too."""

    def check(self) -> None:
        """Refuse values that cannot work together."""
        data = registry.data_set(self.data)
        # We do not know whether the targets of a user's own data set are classes.
        classes = data.classifies and "environments" not in data.tasks
        if classes and 1 in (self.ways, self.train_ways):
            name = "--ways" if self.ways == 1 else "--train-ways"
            raise UserError(f"{name} 1: of one class, every answer is right; give 2 or more")


@dataclass(frozen=True)
class OuterLoop(Learner):
    """The outer loop."""

    seed: int = flag(0, least=0, most=2**63 - 1)
    """Seed of all that is random: weights, tasks, images."""
    init: str | None = flag(None)
    """Weights to begin with, of a run, record, checkpoint or state_dict [drawn by --seed]."""
    iterations: int = flag(1000, RESULT, least=0, read_with=("epochs", None))
    """Outer steps in all, a resumed run's earlier ones included."""
    meta_batch_size: int = flag(32, least=1)
    """Tasks per iteration, over all workers."""
    meta_lr: float = flag(1e-3, above=0)
    """Learning rate of the outer loop."""
    meta_optimizer: Literal["adam", "sgd"] = flag("adam")
    """Optimizer of the outer loop."""
    meta_schedule: Literal["constant", "linear", "cosine", "halving"] = flag("constant")
    """How --meta-lr falls to --meta-lr-end over the run, or halves."""
    meta_lr_end: float = flag(0.0, least=0, read_with=("meta_schedule", "linear", "cosine"))
    """linear, cosine: what --meta-lr falls to."""
    meta_halve_every: int = flag(2000, least=1, read_with=("meta_schedule", "halving"))
    """Iterations after which --meta-lr halves, again and again."""
    meta_decay: float = flag(0.5, above=0, most=1, read_with=("meta_schedule", "halving"))
    """Factor of --meta-lr after each --meta-halve-every."""
    meta_eps: float = flag(1e-8, above=0, read_with=("meta_optimizer", "adam"))
    """ε of the outer loop's Adam, added to √v."""
    meta_momentum: float = flag(0.0, least=0, below=1, read_with=("meta_optimizer", "sgd"))
    """sgd: momentum of the outer loop."""
    grad_clip: float | None = flag(None, above=0)
    """Clip every element of the meta-gradient to this magnitude."""
    grad_clip_norm: float | None = flag(None, above=0)
    """Shrink a meta-gradient whose norm is larger to this norm."""
    weight_decay: float = flag(0.0, least=0)
    """An outer step shrinks weights by this, times its rate (AdamW)."""
    freeze: str | None = flag(None)
    """Parameters that neither adapt nor learn: patterns, as for --adapt."""
    on_nonfinite: Literal["stop", "skip"] = flag("stop", RESULT)
    """After a step that is not finite, and so not taken: stop, or go on."""

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
