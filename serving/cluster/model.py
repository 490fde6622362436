"""The model behind a router, with the interface that servers expect of an `LLM`."""

import dataclasses

from jaxflow.config import ConfigError
from jaxflow.prompt import Prompt, make_request
from jaxflow.request import Request, SamplingParams
from jaxflow.structured.compiler import FormCompiler
from serving.cluster.driver import ClusterDriver


class ClusterModel:
    """The model of several replicas. Requests and texts are made here, tokens at the replicas.

    Args:
      driver: not started.
      chat_template: instead of the checkpoint's, if not None.

    Raises:
      StartFailed: no replica could load the model.
      ConfigError: a chat template for a model without a tokenizer.
    """

    def __init__(
        self,
        driver: ClusterDriver,
        *,
        chat_template: str | None = None,
    ):
        self.driver = driver
        try:
            model = driver.start()
            self.name, self.model_config, self.engine_config = (
                model.name,
                model.model_config,
                model.engine_config,
            )
            self.generation_config, self.max_model_len = model.generation_config, model.max_model_len
            self.tokenizer = model.tokenizer
            vocab_size, ends = self.model_config.vocab_size, self.model_config.eos_token_ids
            self._forms = FormCompiler(self.tokenizer, vocab_size, ends)
            if chat_template is not None:
                if self.tokenizer is None:
                    accepted = "no file, because the model has no tokenizer"
                    raise ConfigError("chat_template", "a file", accepted)
                self.tokenizer = self.tokenizer.with_chat_template(chat_template)
        except BaseException:
            self.close()
            raise

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> Request:
        """Return a request that the replicas accept. Any thread may call it. Raises: InvalidRequest."""
        request = make_request(
            request_id,
            prompt,
            SamplingParams() if sampling is None else sampling,
            self.tokenizer,
            self.model_config.vocab_size,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            forms=self._forms,
        )
        # A replica makes the constraints of its own.
        return self.driver.accept(dataclasses.replace(request, make_constraint=None))

    def close(self) -> None:
        """End the replicas."""
        self.driver.close()
