"""A kit for tests of your own: an engine without a GPU, faults, and the contract of an engine.

Theory of operation
-------------------
An orchestrator (a trainer's loop, a server that switches models) is tested against an
engine that behaves as vLLM does, in milliseconds. The engine is `engine_adapter`'s
simulated one. It does not raise at misuse, as vLLM does not; it *records* it, where code
that swallows exceptions can't hide it, and the fixtures fail the test for it.

`plugin`
    fixtures for pytest, found by it where this distribution is installed:
    `simulated_llm`, `make_simulated_llm`, `simulated_engine`, `event_recorder`.
`faults`
    the script of what goes wrong: at which call, and how.
`recorder`
    a sink that keeps the lifecycle's events, and can be waited at.
`contract`
    `EngineContract`: what an `Engine` must do, one test a rule, to be subclassed.
`strategies`
    what Hypothesis can draw: prompts, parameters, sessions.

Importing this package imports neither pytest, nor Hypothesis, nor any engine: each module
imports what it needs, and the fixtures find the engine when they are used.
"""
