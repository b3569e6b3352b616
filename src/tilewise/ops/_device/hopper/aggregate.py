"""The one import of Triton's aggregates, records with methods, from which Gluon kernels build rings and barriers."""

from triton.language.core import _aggregate


def aggregate(cls):
    """A class whose annotations are its fields, as a device value; its methods are jitted.

    Values are immutable: a method that changes one returns another. Unlike those of a NamedTuple, constexprs in the
    fields stay constexprs when a value is assigned, returned, or carried from one iteration of a loop to the next.
    """
    names = tuple(cls.__annotations__)

    # Triton 3.9 makes a constructor of the annotations; 3.6 and 3.7 want it written out.
    def construct(self, *values, **named):
        given = dict(zip(names, values, strict=False)) | named
        if len(values) + len(named) != len(names) or set(given) != set(names):
            raise TypeError(f"{cls.__name__} takes {', '.join(names)}: got {len(values)} values and {list(named)}")
        for name in names:
            setattr(self, name, given[name])

    construct.__triton_builtin__ = True
    cls.__init__ = construct
    return _aggregate(cls)
