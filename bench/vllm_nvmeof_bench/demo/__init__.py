# SPDX-License-Identifier: Apache-2.0
"""The main job on this machine: a real `vllm serve`, a client, and what offloading is worth.

    model.py     a small random model directory
    server.py    one `vllm serve` process: start, wait, stop, kill
    client.py    the OpenAI HTTP client and the metrics' reader
    workload.py  conversations, their cases, and the crowd that gets preempted
    sizes.py     how large its caches are
    runs.py      what each server is asked
    report.py    figures, verdict, table, build/demo.json
    main.py      the order of things

Nothing here imports vLLM or this package's connector: the server is a process of its own,
and what is known of it was said over HTTP.
"""
