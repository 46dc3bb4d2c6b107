"""Tokenize and Detokenize: the served checkpoint's tokenizer for whoever has none."""

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.generate_request import ServedModel
from scheduler_service.rpc.intake import Tokenizer
from scheduler_service.rpc.status import invalid


class Tokenization:
    def __init__(self, tokenizer: Tokenizer | None, model: ServedModel) -> None:
        self._tokenizer = tokenizer
        self._model = model

    async def tokenize(self, request: scheduler_pb2.TokenizeRequest) -> scheduler_pb2.TokenizeResponse:
        """Raises RpcError."""
        tokenizer = self._required("texts")
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        response = scheduler_pb2.TokenizeResponse()
        for index, text in enumerate(request.texts):
            try:
                token_ids = await tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except ValueError as error:
                raise invalid(f"texts[{index}]", str(error)) from None
            response.prompts.add(ids=token_ids)
        return response

    async def detokenize(self, request: scheduler_pb2.DetokenizeRequest) -> scheduler_pb2.DetokenizeResponse:
        """Raises RpcError."""
        tokenizer = self._required("prompts")
        skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        response = scheduler_pb2.DetokenizeResponse()
        for index, prompt in enumerate(request.prompts):
            highest = max(prompt.ids, default=0)
            if highest >= self._model.vocab_size:
                message = f"token id {highest} is not below the vocabulary's size, {self._model.vocab_size}"
                raise invalid(f"prompts[{index}].ids", message)
            response.texts.append(await tokenizer.text_of(prompt.ids, skip_special_tokens=skip_special_tokens))
        return response

    def _required(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise invalid(field, "the served checkpoint has no tokenizer; send prompts as token ids")
        return self._tokenizer
