"""Errors say whose move it is, and cross processes whole."""

import pickle

import pytest

import lifecycle
from lifecycle import errors

KINDS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_pickle_with_their_fields(kind):
    """An error that crosses a process boundary keeps its class, message and fields."""
    error = kind("what happened", call="step", remaining=("a", "b"))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert (copy.call, copy.remaining) == ("step", ("a", "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_public_and_in_the_tree(kind):
    """Each class is exported, drawn in the module's tree and says when it is raised."""
    assert kind.__name__ in lifecycle.__all__
    assert kind.__name__ in errors.__doc__
    assert kind.__doc__


def test_field_that_is_not_there():
    """A field that an error does not have is an AttributeError, not None."""
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = errors.IllegalCall("x", call="step").nothing


def test_builtin_bases():
    """Callers that know only the builtins catch the right ones."""
    assert issubclass(errors.IllegalCall, RuntimeError)
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.DrainTimeout, TimeoutError)


def test_lists_in_messages_are_cut():
    """A message names a few of many ids and counts the rest."""
    assert errors.some([f"r{index}" for index in range(103)]) == "r0, r1, r2, r3, r4 and 98 more"
    assert errors.some([]) == "nothing"
