"""What differs between a preset and the experiment behind the published number.

Found by reading the released code. Most of what a flag can state is in the preset itself. MAML's
presets keep this project's batch norms and first output layer, with which they were measured.
"""

import fnmatch

_MAML = (
    "maml-omniglot-*",
    "maml-miniimagenet-*shot",
    "maml-cifarfs-*",
    "fomaml-omniglot-*",
    "fomaml-miniimagenet-*shot",
)
_ANIL = ("anil-omniglot-*", "anil-miniimagenet-*shot")

DEVIATIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (*_MAML, *_ANIL),
        "Every training task is new; the released code draws a list of 200,000. Batch norms have a "
        "scale, there a shift alone.",
    ),
    (_MAML, "Batch norms adapt in the inner loop, there they do not."),
    (
        ("maml-omniglot-*", "fomaml-omniglot-*", "anil-omniglot-*"),
        "Convolutions pad on all sides, there at the bottom and on the right. The output layer "
        "begins with small weights, there with N(0, 1).",
    ),
    (
        ("maml-cifarfs-*",),
        "The source gives no command: all but the images is MiniImageNet's.",
    ),
    (
        ("mamlpp-omniglot-*", "mamlpp-miniimagenet-*"),
        "The published number is the mean over three seeds of an ensemble of five models. Ours is "
        "one model; its ensemble has a row of its own.",
    ),
    (
        ("mamlpp-omniglot-*",),
        "The cosine falls with every iteration, there with every epoch. Pixels are grey, light on "
        "dark; there they are one bit, dark on light.",
    ),
    (
        ("mamlpp-miniimagenet-*",),
        "Pixels are from 0 to 1, not normalised by ImageNet's mean and deviation.",
    ),
    (
        ("metasgd-omniglot-*", "metasgd-miniimagenet-*"),
        "There is no released code: what the paper does not say is MAML's, as tasks a step, rates "
        "to begin with and queries at test.",
    ),
    (
        ("metasgd-omniglot-*",),
        "The output layer follows the convolutions; there a layer of 32 is between.",
    ),
    (
        ("metasgd-omniglot-*-5shot",),
        "The published number is of a model that was trained with one shot.",
    ),
    (
        ("protonet-omniglot-*", "protonet-miniimagenet-*shot"),
        "Tests normalise by the support set, there by running statistics of training. Training "
        "has 20,000 episodes, there it ends by validation.",
    ),
    (
        ("protonet-omniglot-*",),
        "Training has 1,028 characters; the released code trains again, with the 172 of validation "
        "among them. A task turns each of its classes; there a turned character is another class. "
        "The released test has 1,000 tasks with 15 queries a class.",
    ),
    (
        ("reptile-omniglot-*", "reptile-miniimagenet-*"),
        "Adam's second moment goes on from iteration to iteration, averaged over tasks; there from "
        "task to task. Non-transductive answers normalise by the support set alone.",
    ),
    (("reptile-omniglot-*",), "Test classes are turned, too, there they are not."),
    (
        ("reptile-miniimagenet-*",),
        "Pooling leaves out a last odd row; the released network pads: 5×5 maps, there 6×6.",
    ),
    (
        ("boil-miniimagenet-*",),
        "Weights begin as this project's do, there as PyTorch's. The published number is over five "
        "times 1,000 tasks.",
    ),
    (
        ("r2d2-miniimagenet-*",),
        "Training images are not augmented, weights do not decay, and momentum is not Nesterov's; "
        "there all three. The ridge regression is the paper's: λ is learned and begins at 1, where "
        "features and labels are divided by √S. Tests normalise by the support set, there by "
        "running statistics of training.",
    ),
    (
        ("cavia-miniimagenet-*",),
        "A feature map is multiplied by 1 + γ, there by γ. Weights begin with Xavier's deviation, "
        "there with Kaiming's. FiLM comes before the pooling, there after it.",
    ),
    (
        ("metacurv-miniimagenet-*",),
        "The release has no command for MiniImageNet: all but the 128 filters is MAML's. Others "
        "quote 70.30 % for 5 shots.",
    ),
    (
        ("protonet-miniimagenet-*-resnet12", "anil-miniimagenet-*-resnet12"),
        "Training images are not augmented and weights do not decay; there they are and do.",
    ),
    (
        ("protonet-miniimagenet-*-resnet12",),
        "Tests normalise by the support set, there by running statistics of training. The source's "
        "page of ProtoNet has 54.25 ± 0.37 and 74.65 ± 0.29 %, of the same values.",
    ),
    (
        ("anil-miniimagenet-*-resnet12",),
        "The release has no file for this row: its rates are those of a comment. Support and query "
        "sets of several tasks are normalised together there.",
    ),
    (
        ("fomaml-miniimagenet-*-resnet12",),
        "The network begins untrained; give --init RUN, a run of finetune-miniimagenet-5way-1shot "
        "--network resnet12. The outer rate of the output layer is that of all, there ten times as "
        "large. The outer loss takes the answers as they are, there twice. Weights do not decay, "
        "there they do. Tests normalise by the support set, there by running statistics.",
    ),
    (
        ("imaml-omniglot-*",),
        "1,100 characters train and 100 validate; there 1,200 train, on a list of tasks. Initial "
        "weights are smaller, and pixels light on dark. The released test draws its characters "
        "anew: 310 of its 423 were trained on.",
    ),
    (
        ("imaml-omniglot-5way-5shot", "imaml-omniglot-20way-*"),
        "The release has no command for this row: its flags are those of 5-way 1-shot, its steps "
        "the paper's.",
    ),
)
"""Patterns of presets' names, and a sentence or two."""


def deviations(preset: str) -> list[str]:
    """Return what differs from the published experiment of ``preset``."""
    return [
        said
        for patterns, said in DEVIATIONS
        if any(fnmatch.fnmatchcase(preset, pattern) for pattern in patterns)
    ]
