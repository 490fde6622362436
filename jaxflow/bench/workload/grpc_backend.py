"""A JaxFlow server over gRPC, as a backend of the load generator."""

import time

import numpy as np

from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.backend import ModelDescription, text_of
from serving.client import Client, RequestFailed


class GrpcBackend:
    """A server behind a client.

    Args:
      text: send prompts as text, see `text_of`.
    """

    def __init__(self, client: Client, text: bool = False):
        self._client, self._text = client, text

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server is ready. Raises: RequestFailed."""
        await self._client.wait_until_ready(timeout_s)

    async def model(self) -> ModelDescription:
        """Return the served model. Raises: RequestFailed."""
        served = await self._client.model()
        return ModelDescription(
            served.name, served.max_model_len, served.vocab_size, served.dtype, served.tensor_parallel_size
        )

    async def ask(
        self, record: Record, prompt: np.ndarray, output_tokens: int, timeout_s: float | None
    ) -> list[int]:
        """See `Backend.ask`."""
        answer = self._client.generate(
            text_of(prompt) if self._text else prompt.tolist(),
            timeout_s=timeout_s,
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            seed=0,
        )
        try:
            await answer.read_all()
            record.finished_s = time.perf_counter()
        except RequestFailed as failure:
            record.error = str(failure)
        record.deliveries = [(answer.sent_at + seconds, count) for seconds, _, count in answer.arrivals]
        if answer.started is not None:
            record.cached_prompt_tokens = answer.started.cached_prompt_tokens
            record.prompt_tokens = answer.started.prompt_tokens or record.prompt_tokens
        return answer.token_ids[0]
