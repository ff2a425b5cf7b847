CREATE TABLE audit ( id INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, who TEXT NOT NULL, origin TEXT NOT NULL, role TEXT, tenant TEXT, what TEXT NOT NULL, vnet TEXT, changes INTEGER NOT NULL, status INTEGER, error TEXT, duration_us INTEGER) STRICT;
CREATE INDEX audit_changes ON audit (changes, id);
INSERT INTO audit VALUES (1, 1700000000001, 'user:root', 'pid 7', 'operator', NULL, 'POST /v1/apply', NULL, 1, 200, NULL, 12);
INSERT INTO audit VALUES (2, 1700000000002, 'token:2', 'pid 7', 'tenant', 'acme', 'GET /v1/vnets/acme.none', 'acme.none', 0, 404, 'no vnet acme.none', 12);
INSERT INTO audit VALUES (3, 1700000000003, 'token:?', 'pid 7', NULL, NULL, 'GET /v1/vnets', NULL, 0, 401, NULL, 12);
INSERT INTO audit VALUES (4, 1700000000004, 'token:2', 'pid 7', 'tenant', 'acme', 'POST /v1/vnets/acme.lab/nodes/h1/exec', 'acme.lab', 1, NULL, NULL, NULL);
