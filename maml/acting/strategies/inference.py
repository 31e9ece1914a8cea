"""What answers requests for actions, whichever way they come: all of a step by one forward pass."""

import copy
import threading
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from maml.acting.policy import Policy
from maml.params import Params
from maml.strategies.gathering import Answer, answer_all


class Inference:
    """The policy of one step of training, for any thread; ``forwards`` answered ``requests``."""

    def __init__(self, learner: Policy) -> None:
        self._learner = learner
        # A module of its own: who applies the learner's to parameters swaps its tensors meanwhile.
        self._policy = copy.deepcopy(learner.network).requires_grad_(False)
        self._seen = learner.environment.observation_size
        self.forget()

    def forget(self) -> None:
        """Count anew."""
        self.forwards, self.requests = 0, 0

    def follow(self, meta_params: Params) -> None:
        """Answer by ``meta_params`` from here on; nobody is to be asking."""
        weights = self._learner.network_weights(meta_params)
        with torch.no_grad():
            for name, tensor in self._policy.named_parameters():
                tensor.copy_(weights[name])

    @torch.no_grad()
    def __call__(self, requests: list[Tensor]) -> list[Tensor]:
        """Return the actions for requests ``[n, O + D]``, observations and draws, by one pass."""
        rows = torch.cat(requests)
        observations, draws = rows[:, : self._seen], rows[:, self._seen :]
        dtype = next(self._policy.parameters()).dtype
        outputs, _ = self._policy(observations.to(dtype), None)
        actions = self._learner.choose(outputs, draws)
        self.forwards += 1
        self.requests += len(requests)
        return list(actions.split([len(request) for request in requests]))


class Batches:
    """Gathers one request of each observer; the last one that comes answers all.

    A batch that is not complete after ``wait`` seconds is answered as it is: it is ``flushed``.
    """

    def __init__(self, inference: Inference, wait: float) -> None:
        self._inference, self._wait = inference, wait
        self._changed = threading.Condition()
        self._playing: set[int] = set()
        self._asked: dict[int, tuple[Tensor, Answer]] = {}
        self._since = 0.0
        self.flushed = 0
        threading.Thread(target=self._flush, name="batches", daemon=True).start()

    def begin(self, ranks: Iterable[int]) -> None:
        """Expect requests of these observers."""
        with self._changed:
            self._playing = set(ranks)

    def leave(self, rank: int) -> None:
        """Expect no more requests of an observer."""
        with self._changed:
            self._playing.discard(rank)
            batch = self._take_if_complete()
        self._answer(batch)

    def ask(self, rank: int, request: Tensor) -> Answer:
        """Return the answer to come; no thread is held meanwhile."""
        answer: Answer = torch.futures.Future()
        with self._changed:
            if not self._asked:
                self._since = time.monotonic()
                self._changed.notify()
            self._asked[rank] = request, answer
            batch = self._take_if_complete()
        self._answer(batch)
        return answer

    def _take_if_complete(self, *, late: bool = False) -> dict[int, tuple[Tensor, Answer]]:
        if len(self._asked) < len(self._playing) and not late:
            return {}
        batch, self._asked = self._asked, {}
        return batch

    def _answer(self, batch: dict[int, tuple[Tensor, Answer]]) -> None:
        if batch:
            # In the order of ranks, not of arrival: a repeated run has the same bits.
            requests, answers = zip(*(batch[rank] for rank in sorted(batch)), strict=True)
            answer_all(answers, lambda: self._inference(list(requests)))

    def _flush(self) -> None:
        while True:
            with self._changed:
                left = self._since + self._wait - time.monotonic() if self._asked else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                batch = self._take_if_complete(late=True)
                self.flushed += 1
            self._answer(batch)
