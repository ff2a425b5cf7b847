//! The endpoints of the API, one row each: what a request requires, how it is answered, and its
//! handler. The handler's `#[utoipa::path]` has method, path and docs.

use std::collections::BTreeMap;

use hyper::Method;
use utoipa::openapi::path::PathItem;
use utoipa_axum::router::UtoipaMethodRouter;
use utoipa_axum::routes;

use super::limits::ResponseMode;
use super::{
    Api, SMALL_BODY_BYTES_MAX, change, description, exec, fastpath, identity, images, read, stream,
    watch,
};
use crate::access::Permission;

/// Rules for the requests of one endpoint.
#[derive(Clone, Copy, Debug)]
pub struct RequestRules {
    /// Permission that the client needs. It also decides how the request is audited.
    pub permission: Permission,
    /// Limits that the request counts against.
    pub mode: ResponseMode,
    /// Largest body, bytes.
    pub body_bytes_max: usize,
}

/// An endpoint: one method of one path.
pub struct ApiEndpoint {
    rules: RequestRules,
    /// Handler with its method, path and description.
    pub route: UtoipaMethodRouter<Api>,
}

impl ApiEndpoint {
    fn large_body(mut self) -> Self {
        self.rules.body_bytes_max = pdp_api::BODY_BYTES_MAX;
        self
    }
}

fn row(permission: Permission, mode: ResponseMode, route: UtoipaMethodRouter<Api>) -> ApiEndpoint {
    let rules = RequestRules { permission, mode, body_bytes_max: SMALL_BODY_BYTES_MAX };
    ApiEndpoint { rules, route }
}

/// Returns all endpoints, in the order of the description.
pub fn endpoints() -> Vec<ApiEndpoint> {
    use Permission::{Apply, ChangeNode, ChangeVnet, EnterVnet, Known, ReadNode, ReadVnet};
    use ResponseMode::{Session, Whole};
    vec![
        row(Known, Whole, routes!(read::version)),
        row(Known, Whole, routes!(description::openapi)),
        row(Known, Whole, routes!(description::spec_schema)),
        row(ReadNode, Whole, routes!(read::doctor)),
        row(Known, Whole, routes!(read::substrate)),
        row(ChangeNode, Whole, routes!(change::delete_substrate)),
        row(Known, Whole, routes!(read::vnets)),
        row(ReadVnet, Whole, routes!(read::vnet)),
        row(ChangeVnet, Whole, routes!(change::delete_vnet)),
        row(Known, Whole, routes!(read::stats)),
        row(Known, Session, routes!(watch::watch)),
        row(ReadVnet, Whole, routes!(read::fdb)),
        row(ChangeVnet, Whole, routes!(read::clear_fdb)),
        row(EnterVnet, Whole, routes!(read::trace)),
        row(Apply, Whole, routes!(change::apply)).large_body(),
        row(ChangeNode, Whole, routes!(change::up)),
        row(ChangeNode, Whole, routes!(change::down)),
        row(ChangeVnet, Whole, routes!(change::set_link)),
        row(ChangeVnet, Whole, routes!(change::change_link)),
        row(ChangeVnet, Whole, routes!(change::scale)),
        row(ChangeVnet, Whole, routes!(change::restart)),
        row(ReadVnet, Session, routes!(stream::routes)),
        row(ReadVnet, Whole, routes!(fastpath::fastpath_filters)),
        row(ChangeVnet, Whole, routes!(fastpath::change_fastpath)).large_body(),
        row(ReadVnet, Whole, routes!(fastpath::fastpath_counters)),
        row(ReadVnet, Whole, routes!(fastpath::fastpath_queues)),
        row(EnterVnet, Whole, routes!(fastpath::send_frame)),
        row(EnterVnet, Session, routes!(stream::capture)),
        row(ReadNode, Session, routes!(stream::logs)),
        row(ReadVnet, Session, routes!(stream::node_logs)),
        row(EnterVnet, Session, routes!(exec::exec)),
        row(Known, Whole, routes!(identity::tenants)),
        row(ChangeNode, Whole, routes!(change::delete_tenant)),
        row(ReadNode, Whole, routes!(identity::tokens)),
        row(ChangeNode, Whole, routes!(identity::create_token)),
        row(ChangeNode, Whole, routes!(identity::revoke_token)),
        row(Known, Whole, routes!(identity::audit)),
        row(Known, Whole, routes!(images::images)),
        row(Apply, Whole, routes!(images::pull_image)),
        row(Apply, Whole, routes!(images::prune_images)),
        row(Apply, Whole, routes!(images::delete_image)),
    ]
}

/// Rules of all endpoints.
#[derive(Debug)]
pub struct RuleTable(BTreeMap<String, Vec<(Method, RequestRules)>>);

impl RuleTable {
    /// Takes the rules from [`endpoints`].
    pub fn new() -> Self {
        let mut table: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for ApiEndpoint { rules, route: (_, paths, _) } in endpoints() {
            for (path, item) in paths.paths {
                let methods = methods(&item).into_iter().map(|method| (method, rules));
                table.entry(path).or_default().extend(methods);
            }
        }
        Self(table)
    }

    /// Returns the rules of a request; `None` if the path has no such method. `path` is as the API
    /// describes it.
    pub fn find(&self, method: &Method, path: &str) -> Option<RequestRules> {
        // HEAD requires the same as GET.
        let method = if *method == Method::HEAD { &Method::GET } else { method };
        self.0.get(path)?.iter().find(|row| row.0 == *method).map(|row| row.1)
    }
}

/// Returns the described methods of a path.
fn methods(item: &PathItem) -> Vec<Method> {
    let all = [
        (Method::GET, &item.get),
        (Method::PUT, &item.put),
        (Method::POST, &item.post),
        (Method::DELETE, &item.delete),
        (Method::PATCH, &item.patch),
    ];
    all.into_iter().filter(|(_, operation)| operation.is_some()).map(|(method, _)| method).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_described_operation_has_exactly_one_row() {
        let description: serde_json::Value =
            serde_json::from_str(&super::super::openapi()).unwrap();
        let paths = description["paths"].as_object().unwrap();
        let described = paths.iter().flat_map(|(path, item)| {
            item.as_object()
                .unwrap()
                .keys()
                .map(move |method| (path.clone(), method.to_uppercase()))
        });
        let mut described: Vec<_> = described.collect();
        let table = RuleTable::new();
        let rows = table.0.iter().flat_map(|(path, rows)| {
            rows.iter().map(move |(method, _)| (path.clone(), method.to_string()))
        });
        let mut rows: Vec<_> = rows.collect();
        described.sort();
        rows.sort();
        assert_eq!(described, rows);
        assert_eq!(rows.len(), endpoints().len());
        assert!(table.find(&Method::HEAD, pdp_api::paths::VNETS).is_some());
        assert!(table.find(&Method::PATCH, pdp_api::paths::VNETS).is_none());
    }

    /// A path with a vnet is checked against the client's vnets.
    #[test]
    fn endpoints_of_a_vnet_require_a_permission_for_it() {
        for (path, rows) in RuleTable::new().0 {
            for (method, rules) in rows {
                let of_vnet = matches!(
                    rules.permission,
                    Permission::ReadVnet | Permission::EnterVnet | Permission::ChangeVnet
                );
                assert_eq!(of_vnet, path.contains("{vnet}"), "{method} {path}");
            }
        }
    }
}
