"""Device library.

`client`          `Device`: joins rounds and sends updates
`secagg_client`   the same in a secure round
`torch_fit`       `fit`: trains a torch module
"""
