"""OpenAI's Python client against a cascade: which model answered, why, and what all attempts cost.

    .venv/bin/python examples/cascade_client.py          # the client comes with vLLM; elsewhere: pip install openai

MILLRACE_URL and MILLRACE_KEY name another address and a key, MILLRACE_CASCADE one of several cascades.
"""

import argparse
import os

import openai

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
client = openai.OpenAI(
    base_url=os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("MILLRACE_KEY", "unused"),
)
try:
    models = client.models.list().data
except openai.APIConnectionError:
    raise SystemExit(f"no server at {client.base_url}; `./task up --cascade nano,micro,mini` starts one") from None
cascades = {model.id: model.cascade for model in models if "cascade" in (model.model_extra or {})}
if not cascades:
    raise SystemExit("this server has no cascade; its models answer by their own names")
name = os.environ.get("MILLRACE_CASCADE") or next(iter(cascades))
print(f"{name} asks {', then '.join(cascades[name])}")


def tell(told: dict, usage: openai.types.CompletionUsage) -> None:
    """Print what the cascade did."""
    print(f"  {told['model']} (tier {told['tier']}) answered, score {told['score']}, because: {told['reason']}")
    for attempt, cost in zip(told["attempts"], usage.cascade["attempts"], strict=True):
        limit = "" if attempt["threshold"] is None else f" against {attempt['threshold']}"
        score = f"score {attempt['score']}{limit}"
        print(f"    {attempt['model']}: {attempt['outcome']}, {score}, {cost['completion_tokens']} output tokens")


QUESTIONS = (
    "Repeat the word candle 3 times.",  # of the models that ship, the smallest answers this one
    "Reverse this text: xpvbfiwawuyp",  # ... the middle one this
    "What is 99 times 5?",  # ... and the largest this
)
for question in QUESTIONS:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=64)
    print(f"{question} {answer.choices[0].message.content!r}")
    tell(answer.cascade, answer.usage)

print("as a stream, with a higher quality: ", end="")
stream = client.chat.completions.create(
    model=name,
    messages=[{"role": "user", "content": QUESTIONS[0]}],
    temperature=0,
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"cascade": {"quality": 95}},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print()
        tell(chunk.cascade, chunk.usage)
