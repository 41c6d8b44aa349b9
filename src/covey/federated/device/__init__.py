"""The device library.

`client`          `Device`: join a round, train, send the update
`secagg_client`   the same in a secure round
`torch_fit`       `fit`: trains a torch module
"""
