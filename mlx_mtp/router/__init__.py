"""Several models at one address: a parent process without mlx, and one of today's servers a model.

`policy` decides, `fleet` and `child` run the processes, `forward` and `views` answer, `app` is all.
"""
