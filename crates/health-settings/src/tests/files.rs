//! Settings files: how values are read, and how errors are reported.

use std::os::unix::fs::symlink;

use super::*;

#[test]
fn values_in_files_are_read_as_they_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let text = "node:\n  node-name: 1e3\n  cluster-name: True\n  device: [eth0, 10, True]\n\
                services: {service-node-zone: 1.10}\n";
    fs::write(&file, text).expect("a file");
    let settings = loaded(&file, &[]).expect("valid settings");
    assert_eq!(settings.node.node_name, "1e3");
    assert_eq!(settings.node.cluster_name, "True");
    assert_eq!(settings.node.devices, ["eth0", "10", "True"]);
    assert_eq!(settings.services.service_node_zone.as_deref(), Some("1.10"));
    fs::write(&file, "node: {device: 'a, b'}\n").expect("a file");
    assert_eq!(
        loaded(&file, &[]).expect("valid settings").node.devices,
        ["a", "b"]
    );
}

#[test]
fn what_is_wrong_in_a_file_is_named_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    for (text, says) in [
        (
            "mesh:\n  probe-intervall: 1s\n",
            ":2:3: unknown setting 'probe-intervall'; did you mean probe-interval?",
        ),
        (
            "mesch:\n  probe-interval: 1s\n",
            ":1:1: unknown group 'mesch'; did you mean mesh?",
        ),
        (
            "node:\n  probe-interval: 1s\n",
            ":2:3: probe-interval belongs in the group mesh",
        ),
        (
            "mesh:\n  probe-interval: 10\n",
            ":2:19: probe-interval '10': ",
        ),
        (
            "mesh:\n  health-port: 70000\n",
            ":2:16: health-port '70000': must be 1 to 65535",
        ),
        (
            "mesh:\n  health-port: [1, 2]\n",
            ":2:16: health-port takes a single value, not a list",
        ),
        (
            "mesh:\n  probe:\n  - http=1s\n  - bogus\n",
            ":4:5: probe 'bogus': ",
        ),
        (
            "services:\n  services-from-kubernetes: true\n",
            ":2:29: services-from-kubernetes 'true': expected the absolute path of a kubeconfig, or default",
        ),
        (
            "node:\n  registry: etcd:http://root:secret@a:2379\n",
            ":2:13: registry 'etcd:http://root:secret@a:2379': ",
        ),
        (
            "mesh:\n  health-port: 0x10\n",
            ":2:16: health-port '0x10': ",
        ),
        (
            "mesh:\n  one-way: maybe\n",
            ":2:12: one-way 'maybe': expected true or false",
        ),
        (
            "policy:\n  policy-mode: sometimes\n",
            ":2:16: policy-mode 'sometimes': expected default, always, never",
        ),
        (
            "node:\n  node-name: \"\"\n",
            ":2:3: node-name '': must be 1 to 253 bytes",
        ),
        (
            "mesh:\n  probe-timeout: 11s\n",
            ":2:3: probe-timeout '11s': must not exceed the shortest interval",
        ),
        ("mesh: {probe-rate: 1}\nmesh: {probe-rate: 2}\n", ":2:1: "),
        ("mesh:\n\tprobe-rate: 1\n", ":2:"),
        ("mesh: 5\n", ":1:"),
        ("[mesh]\n", ":1:"),
    ] {
        fs::write(&file, text).expect("a file");
        let error = loaded(&file, &[]).expect_err(text).to_string();
        let start = format!("{}{says}", file.display());
        assert!(error.starts_with(&start), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error:?}");
    }
    for text in [
        "",
        "# nothing\n",
        "mesh:\n",
        "mesh:\n  probe-rate:\n",
        "{}",
        "node: {device: []}\n",
    ] {
        fs::write(&file, text).expect("a file");
        loaded(&file, &[]).expect(text);
    }
    let missing = loaded(&folder.path().join("none.yaml"), &[]).expect_err("no file");
    assert!(
        missing.to_string().contains("none.yaml: No such file"),
        "{missing}"
    );
}

#[test]
fn what_is_no_file_of_bounded_length_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let long = folder.path().join("long");
    fs::write(&long, "#".repeat(2 << 20)).expect("a file");
    let bytes = folder.path().join("bytes");
    fs::write(&bytes, [0xff, 0xfe]).expect("a file");
    for (path, says) in [
        (pipe.as_path(), "not a regular file"),
        (Path::new("/dev/zero"), "not a regular file"),
        (folder.path(), "not a regular file"),
        (&long, "longer than 1048576 bytes"),
        (&bytes, "UTF-8"),
        (&folder.path().join("none"), "No such file"),
    ] {
        let error = loaded(path, &[]).expect_err(says).to_string();
        let start = format!("cannot read {}: ", path.display());
        assert!(error.starts_with(&start) && error.contains(says), "{error}");
    }
    let file = folder.path().join("config.yaml");
    fs::write(&file, "").expect("a file");
    symlink("nowhere", folder.path().join("config.d")).expect("a link");
    let error = loaded(&file, &[]).expect_err("a dangling link").to_string();
    assert!(error.contains("config.d: No such file"), "{error}");
}
