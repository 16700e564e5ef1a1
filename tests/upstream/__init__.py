# SPDX-License-Identifier: Apache-2.0
"""vLLM's released tests run with our connector, and other releases of vLLM.

`releases` fetches a release's source distribution, `trees` unpacks the parts that are needed, and
`suite` runs vLLM's tests of its offloading connector. No part of a release enters the repository.
"""
