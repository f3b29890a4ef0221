"""OpenAI's Python client against a running cluster: whole answers, streams, choices, logprobs, schemas, typed errors.

    ./task up
    .venv/bin/python examples/openai_client.py          # the client comes with vLLM; elsewhere: pip install openai

MILLRACE_URL and MILLRACE_KEY name another address and a key.
"""

import argparse
import json
import os

import openai

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
client = openai.OpenAI(
    base_url=os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("MILLRACE_KEY", "unused"),
)
try:
    model = client.models.list().data[0].id
except openai.APIConnectionError:
    raise SystemExit(f"no server at {client.base_url}; `./task up` starts one") from None
# The models that ship answer the tasks of their cards (models/*/README.md), and nothing else.
question = [{"role": "user", "content": "Say the word cup 9 times."}]

answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=60)
print("whole:   ", answer.choices[0].message.content, answer.usage)

stream = client.chat.completions.create(
    model=model,
    messages=question,
    temperature=0,
    max_tokens=60,
    stream=True,
    stream_options={"include_usage": True},
)
print("streamed: ", end="")
for chunk in stream:
    print(chunk.choices[0].delta.content or "" if chunk.choices else chunk.usage, end="", flush=True)
print()

answer = client.chat.completions.create(
    model=model, messages=question, n=2, seed=7, stop=["p cup"], max_tokens=20, logprobs=True, top_logprobs=2
)
for choice in answer.choices:
    first = choice.logprobs.content[0]
    print(f"choice {choice.index}:", repr(choice.message.content), choice.finish_reason, first.token, first.logprob)

# What fits a schema is well-formed; of the models that ship it means nothing.
schema = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no", "perhaps"]}, "times": {"type": "integer"}},
    "required": ["answer", "times"],
}
try:
    answer = client.chat.completions.create(
        model=model,
        messages=question,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    print("schema:  ", json.loads(answer.choices[0].message.content))
except openai.BadRequestError as error:  # modelled engines have no grammars
    print("schema:  ", error.message)

text = client.completions.create(model=model, prompt="1 2 3 4 5", max_tokens=8, temperature=0)
print("text:    ", repr(text.choices[0].text))

try:
    client.chat.completions.create(model="no-such-model", messages=question)
except openai.NotFoundError as error:
    print("error:   ", error.status_code, error.code, error.param, error.request_id)
