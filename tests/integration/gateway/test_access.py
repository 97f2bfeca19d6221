"""Who may do what: the route table, keys, and a key store that comes and goes."""

import pytest

from headrace.core.ids import TenantId
from headrace.gateway.auth import cache_salt, new_key
from headrace.gateway.routes import Access
from headrace.ports.store import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def test_every_route_enforces_its_policy(launch):
    """Walks the table: what is not public answers 401 without a key, and 403 to a key of the other role."""
    platform = await launch(open_metrics=False)
    assert {route.path for route in platform.app.routes if route.access is Access.PUBLIC} == {"/healthz", "/readyz"}
    keys = {Access.TENANT: platform.key, Access.OPERATOR: platform.admin_key}
    async with platform.http() as http:
        for route in platform.app.routes:
            path = route.path.replace("{id:path}", "tiny")

            async def status(headers, route=route, path=path):
                request = http.build_request(route.method, path, json=BODY | {"prompt": "x"}, headers=headers)
                request.headers.pop("authorization", None)
                request.headers.update(headers)
                return (await http.send(request)).status_code

            if route.access is Access.PUBLIC:
                assert await status({}) == 200
                continue
            assert await status({}) == 401
            assert await status(bearer("hr-00000000-0000000000000000")) == 401
            for access, key in keys.items():
                expected = {200, 400} if access is route.access else {403}
                assert await status(bearer(key)) in expected, (route, access)


async def test_metrics_are_open_unless_closed(platform):
    async with platform.http() as http:
        assert (await http.get("/metrics", headers={"authorization": ""})).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer sk-something",
        "Basic dXNlcjpwYXNz",
        "Bearer hr-zz-aaaaaaaaaaaaaaaaaaaa",
        "Bearer hr-" + "a" * 5000 + "-b",
        "Bearer hr-deadbeefdeadbeef-wrongsecretwrongsecret",
        "\xff\xfe",
    ],
)
async def test_bad_credentials_are_401_with_all_fields(platform, authorization):
    async with platform.http() as http:
        answer = await http.post(CHAT, json=BODY, headers={"authorization": authorization.encode("latin-1")})
    assert answer.status_code == 401
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_a_wrong_secret_of_a_real_key_is_told_like_an_unknown_key(platform):
    async with platform.http() as http:
        wrong = await http.post(CHAT, json=BODY, headers=bearer(platform.key[:-4] + "AAAA"))
        unknown = await http.post(CHAT, json=BODY, headers=bearer("hr-deadbeefdeadbeef-" + "A" * 43))
    assert wrong.status_code == unknown.status_code == 401
    assert wrong.json() == unknown.json()


async def test_a_revoked_key_stops_working_after_its_time(launch):
    platform = await launch(key_ttl_s=0.05)
    async with platform.http() as http:
        assert (await http.get("/v1/models")).status_code == 200
        await platform.keys.revoke_key(platform.key_id)
        num_lookups = platform.keys.num_lookups
        while platform.keys.num_lookups == num_lookups:
            answer = await http.get("/v1/models")
        assert answer.status_code == 401
        assert "revoked" in answer.json()["error"]["message"]


async def test_known_keys_work_through_an_outage_and_unknown_ones_are_503(launch):
    platform = await launch(key_ttl_s=0.001)
    async with platform.http() as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        platform.keys.down = True
        assert (await http.post(CHAT, json=BODY)).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        answer = await http.post(CHAT, json=BODY, headers=bearer("hr-deadbeefdeadbeef-" + "A" * 43))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "store_unavailable"


async def test_a_gateway_that_knows_no_key_is_not_ready_in_an_outage(launch):
    platform = await launch()
    platform.keys.down = True
    async with platform.http() as http:
        assert (await http.get("/readyz")).status_code == 503


async def test_the_cache_scope_is_the_tenants_whatever_is_sent(launch):
    platform = await launch()
    other_key, row = new_key(TenantId("tenant-b"), Role.TENANT, created_at=0.0)
    await platform.keys.add_key(row)
    requests = []
    submit = platform.engines["w0"].submit
    platform.engines["w0"].submit = lambda request: (requests.append(request), submit(request))
    async with platform.http() as http:
        await http.post(CHAT, json=BODY)
        await http.post(CHAT, json={**BODY, "user": "x", "prompt_cache_key": "tenant-b"})
        await http.post(CHAT, json=BODY, headers=bearer(other_key))
        assert (await http.post(CHAT, json={**BODY, "cache_salt": "x"})).status_code == 400
    salts = [request.cache_salt for request in requests]
    assert salts[0] == salts[1] == cache_salt("a secret of the tests", TenantId("tenant-a"))
    assert salts[2] == cache_salt("a secret of the tests", TenantId("tenant-b"))
    assert len(set(salts)) == 2
    assert [request.tenant_id for request in requests] == ["tenant-a", "tenant-a", "tenant-b"]
