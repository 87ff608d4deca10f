"""A forward pass through Mixture-of-Experts layers; run it with `python -m epd.demo --help`.

It computes what epd-moe-demo does (client/tools/demo), operation by operation in float32, so that the
checksum of the hidden states is the same. Needs numpy.
"""
