"""The meta-learners by their usual names. Each contains the program's learner of that name."""

from maml.library.meta_learner import MetaLearner


class MAML(MetaLearner):
    """Finn et al. 2017, arXiv:1703.03400; ``order=1`` is its first-order approximation."""


class ANIL(MetaLearner):
    """MAML in which only the output layer adapts (Raghu et al. 2020, arXiv:1909.09157)."""


class BOIL(MetaLearner):
    """MAML in which the output layer does not adapt (Oh et al. 2021, arXiv:2008.08882)."""


class MetaSGD(MetaLearner):
    """MAML that also learns an inner rate for each weight (Li et al. 2017, arXiv:1707.09835)."""


class MetaCurvature(MetaLearner):
    """MAML that learns to transform inner gradients (Park and Oliva 2019, arXiv:1902.03356)."""


class MAMLpp(MetaLearner):
    """MAML++: learned rates and norms for each step (Antoniou et al. 2019, arXiv:1810.09502)."""


class CAVIA(MetaLearner):
    """Only a small context vector adapts (Zintgraf et al. 2019, arXiv:1810.03642)."""


class IMAML(MetaLearner):
    """The implicit gradient of a regularised inner loop (Rajeswaran et al. 2019, 1909.04630)."""


class Reptile(MetaLearner):
    """Moves the weights towards the adapted ones (Nichol et al. 2018, arXiv:1803.02999)."""


class ProtoNet(MetaLearner):
    """Chooses the class with the nearest mean feature (Snell et al. 2017, arXiv:1703.05175)."""


class R2D2(MetaLearner):
    """Ridge regression on features (Bertinetto et al. 2019, arXiv:1805.08136)."""
