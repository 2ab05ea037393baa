//! CIDRs in documents, with and without exceptions.

use health_model::address::{AddressError, parse_network, parse_network_or_ip};
use health_model::manifest;
use ipnet::IpNet;

use super::error::{PolicyError, Problem};
use super::field::Field;

/// The API server's message about a string that is not a CIDR.
const NO_CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";

/// Reads a CIDR as in Cilium's rules; an address counts as the CIDR of only that address.
pub(super) fn read_cidr(field: &Field<'_>) -> Result<IpNet, PolicyError> {
    let text = field.text()?;
    let read = parse_network_or_ip(text).or_else(|error| match text.parse() {
        Ok(cidr) if field.is_stored() => Ok(cidr),
        _ => Err(error),
    });
    let cidr = read.map_err(|error| {
        let problem = match error {
            AddressError::ShortMapped => error.to_string(),
            _ => "not a CIDR such as 10.0.0.0/8 or fd00::/8".to_owned(),
        };
        field.error(Problem::value(text, problem))
    })?;
    Ok(cidr.trunc())
}

/// Reads a CIDR and its exceptions as in Cilium's CIDR sets.
pub(super) fn read_cidr_set(field: &Field<'_>) -> Result<(IpNet, Vec<IpNet>), PolicyError> {
    let fields = field.fields(&["cidr", "except"])?;
    let cidr = read_cidr(&fields.required("cidr")?)?;
    let mut excepts = Vec::new();
    for field in fields.items("except")? {
        let except = read_cidr(&field)?;
        if !cidr.contains(&except) {
            // Earlier versions treated an IPv4-mapped IPv6 network as an IPv6 network.
            if field.is_stored() {
                continue;
            }
            let problem = format!("not within {cidr}, so it excludes nothing");
            return Err(field.error(Problem::value(except, problem)));
        }
        excepts.push(except);
    }
    Ok((cidr, excepts))
}

/// Reads a CIDR and its exceptions as in Kubernetes' IP blocks.
pub(super) fn read_ip_block(field: &Field<'_>) -> Result<(IpNet, Vec<IpNet>), PolicyError> {
    if field.is_stored() {
        return read_cidr_set(field);
    }
    let fields = field.fields(&["cidr", "except"])?;
    let cidr = match fields.get("cidr") {
        Some(field) if field.value() != "" => read_api_cidr(&field)?,
        _ => return Err(fields.error_at("cidr", manifest::Problem::Required(""))),
    };
    let mut excepts = Vec::new();
    for field in fields.items("except")? {
        let except = read_api_cidr(&field)?;
        if !cidr.contains(&except) || cidr.prefix_len() >= except.prefix_len() {
            let detail = "must be a strict subset of `cidr`";
            return Err(field.error(manifest::Problem::invalid(field.text()?, detail)));
        }
        excepts.push(except);
    }
    Ok((cidr, excepts))
}

fn read_api_cidr(field: &Field<'_>) -> Result<IpNet, PolicyError> {
    let text = field.text()?;
    let cidr = parse_network(text);
    let cidr = cidr.map_err(|_| field.error(manifest::Problem::invalid(text, NO_CIDR)))?;
    Ok(cidr.trunc())
}
