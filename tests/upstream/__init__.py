# SPDX-License-Identifier: Apache-2.0
"""vLLM's own released tests with our connector in the stock one's place, and other versions of it.

`releases` fetches a release's source distribution, `trees` unpacks what is needed of it, `suite`
runs vLLM's tests of its offloading connector. Nothing of it enters the repository.
"""
