"""Who may come in: tokens, certificates, addresses."""

import asyncio

import grpc
import pytest
from certificates import issue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import client_of, failure, serving, stubs_of, token_request

from serving.__main__ import read_tokens, report_error, warnings
from serving.client import Client, RequestFailed
from serving.frontend.config import ListenError, ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc import generate_pb2 as pb
from serving.grpc import generate_pb2_grpc
from serving.grpc.server import Server

TOKENS = ("first-token", "second-token")
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "first-token"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer first-toke"),),
        (("authorization", "Bearer first-token2"),),
        (("authorization", "Basic first-token"),),
        (("token", "Bearer first-token"),),
        (("authorization", "Bearer wrong"), ("authorization", "Bearer first-token")),
    ],
)
def test_calls_without_a_token_are_refused(metadata):
    async def scenario():
        async with serving(auth_tokens=TOKENS) as (server, llm), stubs_of(server) as (generate, model, admin):
            for call, request in (
                (generate.Generate, token_request()),
                (generate.Tokenize, pb.TokenizeRequest(text="hi")),
                (model.GetModel, pb.GetModelRequest()),
                (admin.GetStats, pb.GetStatsRequest()),
                (admin.Drain, pb.DrainRequest()),
            ):
                error = await failure(call(request, metadata=metadata))
                assert error.code() == UNAUTHENTICATED and "Bearer" in error.details()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                reflection = channel.stream_stream(
                    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
                )
                # Send no message: a message in flight during a refusal fails in the client's library with
                # INTERNAL.
                assert (await failure(reflection(iter(()), metadata=metadata))).code() == UNAUTHENTICATED
                health = health_pb2_grpc.HealthStub(channel)  # an orchestrator's probe has no token
                reply = await health.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            assert llm.driver.submitted == []

    asyncio.run(scenario())


@pytest.mark.parametrize("token", TOKENS)
def test_each_token_opens_every_service(token):
    async def scenario():
        async with (
            serving(auth_tokens=TOKENS) as (server, _),
            client_of(server, auth_token=token) as client,
            stubs_of(server) as stubs,
        ):
            assert (await client.generate([5], max_tokens=1).read_all()).token_ids == [[5]]
            assert (await client.model()).name == "fake"
            metadata = (("authorization", f"bearer {token}"),)
            assert (await stubs[2].GetStats(pb.GetStatsRequest(), metadata=metadata)).steps == 1

    asyncio.run(scenario())


def test_the_admin_service_takes_its_own_tokens_only():
    async def scenario():
        admin_token = (("authorization", "Bearer operator"),)
        token = (("authorization", "Bearer first-token"),)
        settings = {"auth_tokens": TOKENS, "admin_tokens": ("operator",)}
        async with serving(**settings) as (server, _), stubs_of(server) as (generate, _, admin):
            for call in (
                admin.Drain(pb.DrainRequest(), metadata=token),
                admin.GetStats(pb.GetStatsRequest()),
                generate.Generate(token_request(), metadata=admin_token),
            ):
                assert (await failure(call)).code() == UNAUTHENTICATED
            await admin.GetStats(pb.GetStatsRequest(), metadata=admin_token)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "path", ["/grpc.health.v1.Healthy/Check", "/grpc.health.v1.Health", "//grpc.health.v1.Health/Check"]
)
def test_only_the_exact_health_service_is_open(path):
    async def scenario():
        async with (
            serving(auth_tokens=TOKENS) as (server, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            assert (await failure(channel.unary_unary(path)(b""))).code() == UNAUTHENTICATED

    asyncio.run(scenario())


def test_the_file_of_tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("one\n\n  two  \n")
    assert read_tokens(str(path)) == ("one", "two")
    assert read_tokens(None) == ()
    for content in ("", "\n \n", "naïve\n"):
        path.write_text(content)
        with pytest.raises(ValueError, match="auth_token_file"):
            read_tokens(str(path))


def test_tls_with_and_without_certificates_of_callers(tmp_path):
    async def scenario():
        authority, stranger = issue(tmp_path, "authority"), issue(tmp_path, "stranger")
        host, caller = issue(tmp_path, "host", authority), issue(tmp_path, "caller", authority)
        impostor = issue(tmp_path, "impostor", stranger)
        pair = {"tls_cert": str(host.cert), "tls_key": str(host.key)}

        async def served(server, **settings) -> bool:
            async with client_of(server, **settings) as client:
                try:
                    return (
                        await client.generate([5], max_tokens=1, timeout_s=10.0).read_all()
                    ).token_ids == [[5]]
                except RequestFailed as error:
                    assert error.code == grpc.StatusCode.UNAVAILABLE and not error.from_server
                    return False

        def identity(of):
            return {"tls_cert": of.cert, "tls_key": of.key}

        async with serving(**pair) as (server, _):
            assert await served(server, tls_ca=authority.cert)
            assert not await served(server, tls_ca=stranger.cert)
            assert not await served(server)  # in the clear
            files = grpc.ssl_channel_credentials(authority.cert.read_bytes())
            async with grpc.aio.secure_channel(f"127.0.0.1:{server.admin_port}", files) as admin:
                await generate_pb2_grpc.AdminServiceStub(admin).GetStats(pb.GetStatsRequest())
        async with serving(**pair, tls_client_ca=str(authority.cert)) as (server, _):
            assert await served(server, tls_ca=authority.cert, **identity(caller))
            assert not await served(server, tls_ca=authority.cert)
            assert not await served(server, tls_ca=authority.cert, **identity(impostor))

    asyncio.run(scenario())


def test_certificates_that_cannot_be_used_are_named(tmp_path):
    one, other = issue(tmp_path, "one"), issue(tmp_path, "other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")

    async def start(**files):
        paths = {name: str(path) for name, path in files.items()}
        await Server(ServedModel(ServerConfig(port=0, admin_port=0, **paths))).start()

    for files in (
        {"tls_cert": one.cert, "tls_key": other.key},
        {"tls_cert": garbage, "tls_key": one.key},
        {"tls_cert": one.cert, "tls_key": tmp_path / "missing"},
        {"tls_cert": one.cert, "tls_key": one.key, "tls_client_ca": garbage},
    ):
        with pytest.raises(ListenError, match=r"cannot use the certificate .*one|garbage"):
            asyncio.run(start(**files))
    for files in ({"tls_cert": one.cert}, {"tls_key": one.key}, {"tls_client_ca": one.cert}):
        with pytest.raises(ListenError, match="--tls_cert"):
            asyncio.run(start(**files))


def test_the_default_address_is_the_loopback():
    assert (ServerConfig().host, ServerConfig().admin_host) == ("127.0.0.1", "127.0.0.1")
    assert warnings(ServerConfig()) == []
    assert any("--auth_token_file" in line for line in warnings(ServerConfig(host="0.0.0.0")))
    assert any("unencrypted" in line for line in warnings(ServerConfig(host="0.0.0.0", auth_tokens=TOKENS)))
    assert any("--admin_host" in line for line in warnings(ServerConfig(admin_host="0.0.0.0")))
    assert warnings(ServerConfig(host="0.0.0.0", auth_tokens=TOKENS, tls_cert="c", tls_key="k")) == []


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_port_in_use_is_found_at_the_start(which):
    async def scenario():
        async with serving() as (server, _):
            taken = getattr(server, which)
            with pytest.raises(
                ListenError,
                match=rf"cannot listen on 127\.0\.0\.1:{taken}: Address already in use.* --{which} 0 ",
            ):
                await Server(ServedModel(ServerConfig(**{"port": 0, "admin_port": 0, which: taken}))).start()

    asyncio.run(scenario())


def test_full_memory_is_one_line(capsys):
    assert (
        report_error(ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nAllocator: ...")) == 1
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "allocating 8 bytes" in said and "--gpu_memory_utilization" in said


def test_an_address_of_another_machine_is_refused():
    async def start(host):
        await Server(ServedModel(ServerConfig(host=host, port=0, admin_port=0))).start()

    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(ListenError, match=f"cannot listen on {host}:0"):
            asyncio.run(start(host))


def test_ipv6():
    async def scenario():
        server = Server(ServedModel(ServerConfig(host="::1", port=0, admin_port=0)))
        await server.start()
        async with Client(f"[::1]:{server.port}") as client:
            with pytest.raises(RequestFailed, match="loading") as failed:
                await client.model()
            assert failed.value.retry_after_s == 5.0
        await server.stop()

    asyncio.run(scenario())
