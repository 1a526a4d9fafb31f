"""Starts SkyRL's Tinker server (skyrl 0.3.0) without uv; run by the interpreter of its environment.

As it comes, the server starts its engine through `uv run` in a checkout, and its types need
Python 3.12; both are put right here. `python skyrl_launcher.py api --base-model FOLDER --port N`
"""

import argparse
import runpy
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12


def api(arguments: list[str]) -> None:
    """Serve; the engine is this file again."""
    import uvicorn
    from skyrl.tinker import api as server
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    def engine_command(_: list[str], config: EngineConfig) -> list[str]:
        return [sys.executable, __file__, "engine", *config_to_argv(config)]

    server._build_uv_run_cmd_engine = engine_command
    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int, required=True)
    given = vars(parser.parse_args(arguments))
    port = given.pop("port")
    server.app.state.engine_config = EngineConfig.model_validate(given)
    uvicorn.run(server.app, host="127.0.0.1", port=port)


if __name__ == "__main__":
    if sys.argv[1] == "api":
        api(sys.argv[2:])
    else:
        sys.argv = ["skyrl.tinker.engine", *sys.argv[2:]]
        runpy.run_module("skyrl.tinker.engine", run_name="__main__")
