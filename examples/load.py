"""Sends completions at random times to a cluster, to have something to look at: ``python examples/load.py --help``."""

import argparse
import asyncio
import random
import sys
import time

import httpx2


async def send(client: httpx2.AsyncClient, model: str, rng: random.Random) -> str:
    """One request of a random length; why it was not answered, empty where it was."""
    words = min(400, round(rng.lognormvariate(4, 0.8)))
    prompt = " ".join(str(rng.randrange(1000)) for _ in range(words))
    tokens = min(300, 1 + round(rng.lognormvariate(4, 0.7)))
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    try:
        answer = await client.post("/v1/completions", json=body)
    except httpx2.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if answer.status_code == 200 else answer.text


async def main() -> None:
    """Sends until the time is up, and waits for the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that is served")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    rng, sent = random.Random(0), []
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=options.url, timeout=600, limits=limits) as client:
        try:
            models = (await client.get("/v1/models")).raise_for_status().json()["data"]
        except httpx2.HTTPError as error:
            sys.exit(f"{options.url}: {error}")
        model, end = options.model or models[0]["id"], time.monotonic() + options.seconds
        while time.monotonic() < end:
            sent.append(asyncio.create_task(send(client, model, rng)))
            await asyncio.sleep(rng.expovariate(options.rate))
        failures = [reason for reason in await asyncio.gather(*sent) if reason]
    why = f"; one was not: {failures[0]}" if failures else ""
    print(f"{len(sent)} requests, {len(sent) - len(failures)} answered{why}")


if __name__ == "__main__":
    asyncio.run(main())
