"""Sends completions at random times to a cluster, to have something to look at: ``python examples/load.py --help``."""

import argparse
import asyncio
import random
import time

import httpx


async def send(client: httpx.AsyncClient, url: str, model: str, rng: random.Random) -> bool:
    """One request of a random length; says whether it was answered."""
    words = min(400, round(rng.lognormvariate(4, 0.8)))
    prompt = " ".join(str(rng.randrange(1000)) for _ in range(words))
    tokens = min(300, 1 + round(rng.lognormvariate(4, 0.7)))
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    answer = await client.post(f"{url}/v1/completions", json=body)
    return answer.status_code == 200


async def main() -> None:
    """Sends until the time is up, and waits for the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="millrace-mini")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    rng, sent = random.Random(0), []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            sent.append(asyncio.create_task(send(client, options.url, options.model, rng)))
            await asyncio.sleep(rng.expovariate(options.rate))
        answered = sum(await asyncio.gather(*sent))
    print(f"{len(sent)} requests, {answered} answered")


if __name__ == "__main__":
    asyncio.run(main())
