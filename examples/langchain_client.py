"""LangChain against a running cluster: a chat model, a stream, a batch, a schema.

    ./task up
    pip install langchain-openai                        # in an environment of your own
    python examples/langchain_client.py

MILLRACE_URL and MILLRACE_KEY name another address and a key.
"""

import argparse
import os

import openai
from langchain_openai import ChatOpenAI, OpenAI

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
where = {
    "base_url": os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000") + "/v1",
    "api_key": os.environ.get("MILLRACE_KEY", "unused"),
    "model": os.environ.get("MILLRACE_MODEL", "millrace-mini"),
}


chat = ChatOpenAI(**where, temperature=0, max_tokens=40)
try:
    answer = chat.invoke("Say the word cup 9 times.")
except openai.APIConnectionError:
    raise SystemExit(f"no server at {where['base_url']}; `./task up` starts one") from None
print("whole:   ", answer.content, answer.usage_metadata)

print("streamed:", "|".join(str(chunk.content) for chunk in chat.stream("Say the word cup 9 times.")))

print("batch:   ", [each.content for each in chat.batch(["Say the word cup 3 times.", "Please reverse: jyaiptx"])])

schema = {"name": "answer", "schema": {"enum": ["yes", "no", "perhaps"]}}
strict = chat.bind(response_format={"type": "json_schema", "json_schema": schema})
try:
    print("schema:  ", strict.invoke("Say the word cup 9 times.").content)
except openai.BadRequestError as error:  # modelled engines have no grammars
    print("schema:  ", error)

print("text:    ", repr(OpenAI(**where, temperature=0, max_tokens=8).invoke("1 2 3 4 5")))
