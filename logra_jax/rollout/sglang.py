"""The remote engine: prompts go to SGLang servers, token ids and log-probs come back.

What SGLang 0.5.23 does, read in its sources and measured against `transformers`:

- The log-probability of a token is that of the *unfiltered* distribution at the
  sampling temperature, whatever `top_p` and `top_k` are (they act after it is taken);
  of a greedy token at temperature 1. The environment variable
  `SGLANG_RETURN_ORIGINAL_LOGPROB` would make it that of temperature 1: leave it unset.
- A completion ends at a token of `stop_token_ids` or at an end of sequence of the
  model's own files, and holds that token. A tokenizer adds its own ends:
  `--skip-tokenizer-init` is right for token ids in and out.
- Two places of the context stay unused after a completion, and a prompt leaves at least
  seven. What would not fit is cut short without a word, so it is refused here.
- A token outside the vocabulary takes the server down: it is refused here. Logits that
  are not finite come back as an end of sequence: an error here.
- A seed per request is used under `--enable-deterministic-inference` (GPU only) and
  silently ignored otherwise: then the same key does not give the same tokens.
- An aborted request comes back with the tokens so far: no sample of the policy, since
  which are cut depends on their length. It is asked again from its prompt.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from logra_jax.rollout.answers import AbortedError, Answer, read_answer
from logra_jax.rollout.servers import Server, ServerError, Servers, backoff
from logra_jax.rollout.types import Completions, Prompts, Sampling, pack_prompts

# Takes the index of a prompt and the tokens of its completion.
OnAnswer: TypeAlias = Callable[[int, Sequence[int]], None]

_UNUSED_PLACES = 2  # of the context, after the completion
_LONGEST_PROMPT = 7  # places of the context that a prompt leaves, or it is refused
_ABORT_DEADLINE = 2.0  # seconds; a server that is gone must not hold up a cancellation


class SGLangEngine:
    """Samples on SGLang servers, from the weights that they hold.

    One request per prompt goes to the ready server with the fewest in flight. A server
    that cannot be reached, breaks a connection, fails, or exceeds ``request_deadline``
    is no longer ready, and its prompts go to the others; nothing of an answer that did
    not come back whole is used, so that every prompt is answered exactly once. A router
    is asked again instead, after a wait, since it chooses the server.

    Args:
        servers: where to generate; only the ready ones are used.
        max_positions: the model's context, in tokens.
        eos_ids: tokens that end a completion.
        pad_id: fills positions past the end.
        prefix: tokens common to all prompts; the servers find it in their own caches.
        bucket: prompts are padded to a multiple of it.
        request_deadline: seconds for one request, its wait within the server included.
        batch_deadline: seconds for all prompts of a batch.
        attempts: how often a prompt may be asked, whatever went wrong with it.
        vocab_size: of the model; tokens are checked against it. None checks nothing.

    Raises:
        ValueError: a deadline or number of attempts that is not positive.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        max_positions: int,
        eos_ids: Sequence[int],
        pad_id: int = 0,
        prefix: Sequence[int] = (),
        bucket: int = 8,
        request_deadline: float = 600.0,
        batch_deadline: float = 3600.0,
        attempts: int = 5,
        vocab_size: int | None = None,
    ):
        for name, value in (
            ("request_deadline", request_deadline),
            ("batch_deadline", batch_deadline),
            ("attempts", attempts),
        ):
            if not value > 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        self.servers = servers
        self.max_positions = max_positions
        self.eos_ids = tuple(int(token) for token in eos_ids)
        self.pad_id = pad_id
        self.prefix = tuple(int(token) for token in prefix)
        self.bucket = bucket
        self.request_deadline = request_deadline
        self.batch_deadline = batch_deadline
        self.attempts = attempts
        self.vocab_size = vocab_size
        self._pool = _Pool(servers)

    def generate(
        self,
        weights: Any,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: Any,
    ) -> Completions:
        """Sample one completion for each prompt, in order.

        Args:
            weights: not used: the servers hold theirs.
            prompts: token ids, each starting with the engine's prefix.
            sampling: temperature, filters, length.
            key: a seed per request is derived from it; see the module's text.

        Returns:
            Completions with ``versions``. An interrupt aborts what is outstanding.

        Raises:
            ValueError: see :func:`pack_prompts`; a token outside the vocabulary.
            ServerError: no server is left, a prompt was refused or asked too often, or
                the batch exceeded its deadline.
        """
        return self.servers.run(self._prepare(prompts, sampling, key))

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: Any,
        on_answer: OnAnswer | None = None,
    ) -> concurrent.futures.Future[Completions]:
        """As :meth:`generate`, without the wait; cancelling the future aborts it.

        Args:
            prompts: see :meth:`generate`.
            sampling: see :meth:`generate`.
            key: see :meth:`generate`.
            on_answer: called as `on_answer(index, tokens)` for each prompt, once, as
                soon as its completion is there, so that it can be scored while others
                are still sampled. It runs in the thread that talks to the servers and
                must return at once; what it raises ends the batch.

        Raises:
            ValueError: see :meth:`generate`.
        """
        return self.servers.start(self._prepare(prompts, sampling, key, on_answer))

    def _prepare(
        self, prompts, sampling: Sampling, key: Any, on_answer: OnAnswer | None = None
    ):
        """Check everything before anything is sent; the coroutine that sends it."""
        new = sampling.max_new_tokens
        packed = pack_prompts(
            prompts,
            prefix=self.prefix,
            bucket=self.bucket,
            pad_id=self.pad_id,
            limit=self.max_positions - room_for(new),
        )
        tokens = [[int(token) for token in prompt] for prompt in prompts]
        for i, prompt in enumerate(tokens):
            highest = math.inf if self.vocab_size is None else self.vocab_size
            wrong = [token for token in prompt if not 0 <= token < highest]
            if wrong:
                raise ValueError(
                    f"`prompts[{i}]` must hold tokens in [0, {highest}), got "
                    f"{wrong[0]}; use the tokenizer of the model that is served."
                )
        seeds = _seeds(sampling, key, len(tokens))
        return self._batch(packed, tokens, sampling, seeds, on_answer)

    async def _batch(
        self,
        packed: Prompts,
        prompts: list[list[int]],
        sampling: Sampling,
        seeds: list[int | None],
        on_answer: OnAnswer | None,
    ) -> Completions:
        answers: list[Answer | None] = [None] * len(prompts)

        async def fill(i: int) -> None:
            parameters = self._parameters(sampling, seeds[i])
            answer = await self._ask(i, prompts[i], parameters)
            assert answers[i] is None
            answers[i] = answer
            if on_answer is not None:
                on_answer(i, answer.tokens)

        try:
            async with (
                asyncio.timeout(self.batch_deadline),
                asyncio.TaskGroup() as tasks,
            ):
                for i in range(len(prompts)):
                    tasks.create_task(fill(i))
        except TimeoutError:
            done = sum(answer is not None for answer in answers)
            raise ServerError(
                ", ".join(server.url for server in self._pool.targets),
                "deadline",
                f"{done} of {len(prompts)} prompts were answered within "
                f"`batch_deadline` = {self.batch_deadline:g} s; raise it, shorten "
                "`max_new_tokens`, or add servers.",
            ) from None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self._pack(packed, answers, sampling.max_new_tokens)

    async def _ask(self, i: int, prompt: list[int], parameters: dict) -> Answer:
        """One prompt's answer, from whichever server gives it."""
        failure: Exception | None = None
        for attempt in range(self.attempts):
            if attempt and (self.servers.router or isinstance(failure, AbortedError)):
                await asyncio.sleep(backoff(attempt))
            server = await self._pool.take()
            try:
                return await self._try(server, prompt, parameters)
            except AbortedError as error:
                failure = error
            except ServerError as error:
                if error.kind == "refused":
                    raise ServerError(
                        error.url,
                        error.kind,
                        f"`prompts[{i}]` was refused: {error}",
                        error.status,
                    ) from error
                failure = error
                self._pool.leave(server, str(error))
            finally:
                self._pool.give(server)
        raise ServerError(
            ", ".join(server.url for server in self._pool.targets),
            failure.kind if isinstance(failure, ServerError) else "unreachable",
            f"`prompts[{i}]` was asked {self.attempts} times without an answer, the "
            f"most that `attempts` allows; the last time: {failure}",
        ) from failure

    async def _try(self, server: Server, prompt: list[int], parameters: dict):
        # All of one length, or SGLang would abort those that begin with it as well.
        request_id = uuid.uuid4().hex
        routed = server is self.servers.router
        body = {
            "rid": request_id,
            "input_ids": prompt,
            "sampling_params": parameters,
            "return_logprob": True,
        }
        version = self.servers.servers[0].version if routed else server.version
        if version is not None:
            # Prefixes that older weights left in the cache are not found.
            body["extra_key"] = f"version {version}"
        try:
            answer = await server.call(
                "/generate", body, deadline=self.request_deadline
            )
        except asyncio.CancelledError:
            await self._abort(server, request_id)
            raise
        except ServerError as error:
            if error.kind == "deadline":
                await self._abort(server, request_id)
            raise
        return read_answer(answer, server.url, parameters)

    async def _abort(self, server: Server, request_id: str) -> None:
        """Tell the server, or all that may have it, to stop; it need not be heard."""
        routed = server is self.servers.router
        await asyncio.gather(
            *(
                target.call(
                    "/abort_request", {"rid": request_id}, deadline=_ABORT_DEADLINE
                )
                for target in (self.servers.servers if routed else (server,))
            ),
            return_exceptions=True,
        )

    def _parameters(self, sampling: Sampling, seed: int | None) -> dict[str, Any]:
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(self.eos_ids),
        }
        if sampling.min_new_tokens:
            parameters["min_new_tokens"] = sampling.min_new_tokens
        return parameters if seed is None else parameters | {"sampling_seed": seed}

    def _pack(self, packed: Prompts, answers: Sequence[Any], new: int) -> Completions:
        shape = (len(answers), new)
        completions = Completions(
            packed,
            tokens=np.full(shape, self.pad_id, np.int32),
            logprobs=np.zeros(shape, np.float32),
            lengths=np.array([len(answer.tokens) for answer in answers], np.int32),
            finished=np.array([answer.finished for answer in answers], bool),
            versions=np.full(shape, -1, np.int32),
        )
        assert completions.versions is not None
        for i, answer in enumerate(answers):
            length = len(answer.tokens)
            completions.tokens[i, :length] = answer.tokens
            completions.logprobs[i, :length] = answer.logprobs
            completions.versions[i, :length] = answer.versions
        return completions


def room_for(new: int) -> int:
    """Places of the context that a prompt must leave for ``new`` tokens."""
    return max(new + _UNUSED_PLACES, _LONGEST_PROMPT)


def _seeds(sampling: Sampling, key: Any, count: int) -> list[int | None]:
    if sampling.temperature == 0:
        return [None] * count
    import jax

    return np.asarray(jax.random.bits(key, (count,), "uint32")).tolist()


class _Pool:
    """Who may be asked next; used within the loop only."""

    def __init__(self, servers: Servers):
        self._router = servers.router
        self._all = servers.servers
        self.targets = self._all if self._router is None else (self._router,)
        share = 1 if self._router is None else len(self._all)
        self._limit = servers.concurrency * share
        self._load = collections.Counter[Server]()
        self._reasons: dict[Server, str] = {}
        self._waiters = collections.deque[asyncio.Future[None]]()

    async def take(self) -> Server:
        """The ready server with the fewest requests, once it has room for one more.

        Raises:
            ServerError: none is ready.
        """
        while True:
            ready = [s for s in self.targets if s.ready or s is self._router]
            if not ready:
                raise self._none_left()
            server = min(ready, key=self._load.__getitem__)
            if self._load[server] < self._limit:
                self._load[server] += 1
                return server
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():
                    self._wake(1)  # it had been chosen: another's turn
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
                raise

    def give(self, server: Server) -> None:
        """A request of a server has ended."""
        self._load[server] -= 1
        self._wake(1)

    def leave(self, server: Server, reason: str) -> None:
        """Ask a server no more until somebody finds it ready again."""
        if server is not self._router:
            server.ready = False
            self._reasons[server] = reason
            self._wake(len(self._waiters))  # one of them may have waited for the last

    def _wake(self, count: int) -> None:
        while count and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _none_left(self) -> ServerError:
        reasons = "; ".join(
            self._reasons.get(
                server, f"{server.url} has not been given the trainer's weights."
            ).rstrip(".")
            for server in self._all
        )
        return ServerError(
            ", ".join(server.url for server in self._all),
            "unreachable",
            f"No server is left to generate with: {reasons}.",
        )
