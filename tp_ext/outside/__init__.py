"""Functions of torch and of trainers over our parameters: right, or refused by name.

A parameter of ours is an ordinary tensor that holds a shard, and such a function takes it for the whole. One file for
each kind of them; :mod:`tp_ext.outside.wrapped` lists those that are wrapped, since torch offers no hook for them.
Nothing here runs, or communicates, in a forward or a backward.
"""

from tp_ext.outside.wrapped import install

install()
