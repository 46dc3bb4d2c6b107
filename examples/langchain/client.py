"""Uses LangChain with Pagewire's OpenAI API.

pagewire serve models/storyteller
pip install -r examples/langchain/requirements.txt      # in a separate virtual environment
python examples/langchain/client.py [http://HOST:PORT]
"""

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(url: str) -> None:
    model = ChatOpenAI(
        model="storyteller", base_url=f"{url}/v1", api_key="none", temperature=0, max_completion_tokens=40
    )
    chain = ChatPromptTemplate.from_messages([("user", "Once there was a {who}")]) | model
    print(chain.invoke({"who": "brave turtle"}).content)
    for chunk in chain.stream({"who": "little fox"}):
        print(chunk.content, end="", flush=True)
    print()
    for message in chain.batch([{"who": "owl"}, {"who": "bear"}]):
        print(message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
