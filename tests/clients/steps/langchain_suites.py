"""LangChain's standard suites for its clients of OpenAI's, Anthropic's and Ollama's APIs.

pytest runs them in the clients' environment.
"""

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

SERVER = os.environ["SERVER"]
# The server has two names for its model. Its responses contain the first name, and the suites expect both.
NAME, FIRST_NAME = "other", "chatty"
OPENAI = {"model": NAME, "base_url": f"{SERVER}/v1", "api_key": "none", "max_retries": 0}
ANTHROPIC = {"model": NAME, "base_url": SERVER, "api_key": "none", "max_retries": 0}
OLLAMA = {"model": NAME, "base_url": SERVER}
HELLO = "Hello, here is a short text of a model that follows a script."


class TestOpenAIChat(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params: Any = OPENAI | {"use_responses_api": False, "stream_usage": True}
    model_override_value = FIRST_NAME
    supports_json_mode = True


class TestOpenAIResponses(TestOpenAIChat):
    chat_model_params: Any = OPENAI | {"use_responses_api": True}


class TestAnthropicMessages(ChatModelIntegrationTests):
    chat_model_class = ChatAnthropic
    chat_model_params: Any = ANTHROPIC
    model_override_value = FIRST_NAME
    supports_anthropic_inputs = True


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings
    # tiktoken would download its tokenizer.
    embedding_model_params: Any = OPENAI | {"check_embedding_ctx_length": False}


class TestOllamaChat(ChatModelIntegrationTests):
    chat_model_class = ChatOllama
    chat_model_params: Any = OLLAMA | {"temperature": 0, "num_ctx": 4096, "keep_alive": "5m"}
    model_override_value = FIRST_NAME
    supports_json_mode = True
    has_tool_choice = False  # Ollama's API has none


class TestOllamaEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OllamaEmbeddings
    embedding_model_params: Any = OLLAMA


class TestOllamaLLM:
    model = OllamaLLM(**OLLAMA, validate_model_on_init=True, num_predict=100, seed=3)

    def test_invoke(self) -> None:
        assert self.model.invoke("hi") == HELLO
        assert self.model.invoke("hi", stop=[" short"]) == "Hello, here is a"

    def test_stream(self) -> None:
        parts = list(self.model.stream("hi"))
        assert len(parts) > 3
        assert "".join(parts) == HELLO

    async def test_batch(self) -> None:
        assert await self.model.abatch(["hi"] * 4) == [HELLO] * 4

    def test_reasoning(self) -> None:
        (generated,) = self.model.generate(["Think."], reasoning=True).generations[0]
        assert generated.text == HELLO
        assert generated.generation_info["thinking"] == "I think."
