"""LangChain's standard suites for its clients of OpenAI's and Anthropic's APIs, run by pytest in their environment."""

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

SERVER = os.environ["SERVER"]
# The server has two names for its model. Its responses contain the first name, and the suites expect both.
NAME, FIRST_NAME = "other", "chatty"
OPENAI = {"model": NAME, "base_url": f"{SERVER}/v1", "api_key": "none", "max_retries": 0}
ANTHROPIC = {"model": NAME, "base_url": SERVER, "api_key": "none", "max_retries": 0}


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
