"""Several models at one address: a parent process without mlx, and one of today's servers a model.

`policy` decides which models are in memory, `fleet` starts and ends their processes (`child`),
`forward` passes requests on, `views` answers what is about all models, `command` puts it together.
"""
