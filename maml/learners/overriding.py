"""A method that a subclass overrides to no effect is refused where the class is made."""

from __future__ import annotations


def check_overrides(cls: type) -> None:
    """Refuse methods that training and test never call, or not alone.

    A class says so of its own in ``NO_SAY`` and ``NOT_ALONE``: names, and what to override.

    Raises:
        TypeError: naming the method, and the other one.
    """
    for base in cls.__mro__[1:]:
        for name, instead in vars(base).get("NO_SAY", {}).items():
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{name}: {base.__name__} calls none; override {instead}"
                )
        for name, too in vars(base).get("NOT_ALONE", {}).items():
            inherited = getattr(cls, too) is getattr(base, too)
            if name in vars(cls) and too not in vars(cls) and inherited:
                raise TypeError(
                    f"{cls.__name__}.{name}: in training {base.__name__} calls {too} alone; "
                    f"override both ({too} = {base.__name__}.{too} leaves training as it is)"
                )
