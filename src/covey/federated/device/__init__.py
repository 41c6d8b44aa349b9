"""Device library.

`client`          `Device`: joins rounds, sends updates, fetches models
`secagg_client`   masks and sends the update of a secure round
`torch_fit`       `fit`: trains a torch module and sends the update
"""
