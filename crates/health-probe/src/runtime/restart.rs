//! Recreates and restarts containers that have exited.

use super::config::{ContainerConfig, ContainerMetadata, Info, PodSandboxConfig};
use super::messages::{
    Container, ContainerId, ContainerList, ContainerStatusResponse, CreateContainerRequest, EXITED,
    Nothing, PodSandboxStatusResponse, READY, RUNNING, StatusRequest,
};
use super::{LONG_PATIENCE, PATIENCE, Reason, Runtime, RuntimeError};

impl Runtime {
    /// Restarts an exited container: creates the next attempt from its configuration in the same pod, starts that, and
    /// removes the earlier attempts. If an agent was killed midway, a later attempt already exists, and is started
    /// unless it was started before; if the container itself was created but never started, starts it. Returns the ID
    /// of the container that runs afterwards; `None` if the container was running, so nothing was done.
    ///
    /// The configuration is taken from the container's details, as reported by the runtime. Fields that CRI 1.33 does
    /// not have are lost.
    pub async fn restart(&self, container_id: &str) -> Result<Option<String>, RuntimeError> {
        let containers: ContainerList = self
            .call("ListContainers", container_id, Nothing {}, PATIENCE)
            .await?;
        let is_meant = |one: &&Container| one.id == container_id;
        let Some(ended) = containers.containers.iter().find(is_meant) else {
            let reason = Reason::Unusable("no such container".to_owned());
            return Err(self.error("ListContainers", container_id, reason));
        };
        let last = last_attempt(ended, &containers.containers);
        let id = match last.state {
            RUNNING => return Ok(None),
            EXITED => self.make_next(last).await?,
            _ => last.id.clone(),
        };
        let request = ContainerId {
            container_id: id.clone(),
        };
        let started = self.call::<_, Nothing>("StartContainer", &id, request, LONG_PATIENCE);
        let started = started.await;
        // Even if the start failed: otherwise each try would leave another container behind.
        let attempts = containers.containers.iter();
        for earlier in attempts.filter(|one| key(one) == key(ended) && one.state == EXITED) {
            self.remove(&earlier.id).await;
        }
        started.map(|_| Some(id))
    }

    /// Removes an exited container. Errors are ignored: the container's successor is already running, and the process
    /// that runs the pods collects any containers left behind.
    async fn remove(&self, container_id: &str) {
        let request = ContainerId {
            container_id: container_id.to_owned(),
        };
        let removed = self.call::<_, Nothing>("RemoveContainer", container_id, request, PATIENCE);
        match removed.await {
            Err(error) if !error.is_not_found() => {
                tracing::warn!(%error, "cannot remove an exited container");
            }
            _ => {}
        }
    }

    async fn make_next(&self, ended: &Container) -> Result<String, RuntimeError> {
        let unusable =
            |method, subject: &str, why| self.error(method, subject, Reason::Unusable(why));
        let request = |id: &str| StatusRequest {
            id: id.to_owned(),
            verbose: true,
        };
        let method = "ContainerStatus";
        let status: ContainerStatusResponse = self
            .call(method, &ended.id, request(&ended.id), PATIENCE)
            .await?;
        let info = Info::<ContainerConfig>::read(&status.info)
            .map_err(|why| unusable(method, &ended.id, why))?;
        let config = info.config.and_then(next).ok_or_else(|| {
            let why = "its details have no configuration".to_owned();
            unusable(method, &ended.id, why)
        })?;
        let pod = &ended.pod_sandbox_id;
        let method = "PodSandboxStatus";
        let status: PodSandboxStatusResponse =
            self.call(method, pod, request(pod), PATIENCE).await?;
        if status.status.as_ref().is_none_or(|pod| pod.state != READY) {
            return Err(unusable(method, pod, "the pod is terminating".to_owned()));
        }
        let info = Info::<PodSandboxConfig>::read(&status.info)
            .map_err(|why| unusable(method, pod, why))?;
        let pod_config = info.config.ok_or_else(|| {
            let why = "its details have no configuration".to_owned();
            unusable(method, pod, why)
        })?;
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.clone(),
            config: Some(config),
            sandbox_config: Some(pod_config),
        };
        let made: ContainerId = self
            .call("CreateContainer", &ended.id, request, LONG_PATIENCE)
            .await?;
        Ok(made.container_id)
    }
}

/// Returns the configuration of the next attempt, with a separate log if the log's name includes the attempt.
fn next(mut config: ContainerConfig) -> Option<ContainerConfig> {
    let metadata = config.metadata.take()?;
    let attempt = metadata.attempt.saturating_add(1);
    let last = format!("/{}.log", metadata.attempt);
    if let Some(folder) = config.log_path.strip_suffix(&last) {
        config.log_path = format!("{folder}/{attempt}.log");
    }
    config.metadata = Some(ContainerMetadata {
        attempt,
        ..metadata
    });
    Some(config)
}

/// The pod and name of a container.
fn key(container: &Container) -> (&str, &str) {
    let name = container.metadata.as_ref().map(|metadata| &*metadata.name);
    (&container.pod_sandbox_id, name.unwrap_or_default())
}

/// Returns the last attempt of the same container.
fn last_attempt<'a>(one: &'a Container, all: &'a [Container]) -> &'a Container {
    let attempt = |one: &Container| one.metadata.as_ref().map(|metadata| metadata.attempt);
    let same = all.iter().filter(|other| key(other) == key(one));
    same.max_by_key(|one| attempt(one)).unwrap_or(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(id: &str, name: &str, attempt: u32) -> Container {
        Container {
            id: id.to_owned(),
            pod_sandbox_id: "pod".to_owned(),
            metadata: Some(ContainerMetadata {
                name: name.to_owned(),
                attempt,
            }),
            ..Container::default()
        }
    }

    #[test]
    fn the_next_container_differs_by_attempt_and_log_alone() {
        let text = r#"{"pid": 7, "config": {"metadata": {"name": "app", "attempt": 4}, "image": {"image": "i"},
            "command": ["a", "b"], "envs": [{"key": "K", "value": "V"}], "log_path": "app/4.log",
            "mounts": [{"container_path": "/data", "host_path": "/srv", "readonly": true}],
            "linux": {"security_context": {"run_as_user": {"value": 7}, "namespace_options": {"pid": 1}}},
            "windows": {}}}"#;
        let info = std::collections::BTreeMap::from([("info".to_owned(), text.to_owned())]);
        let info = Info::<ContainerConfig>::read(&info).unwrap();
        let config = info.config.unwrap();
        let mut expected = config.clone();
        expected.log_path = "app/5.log".to_owned();
        expected.metadata.as_mut().unwrap().attempt = 5;
        assert_eq!(next(config), Some(expected.clone()));
        let context = expected.linux.unwrap().security_context.unwrap();
        assert_eq!(context.run_as_user.unwrap().value, 7);
        assert_eq!(context.namespace_options.unwrap().pid, 1);
        assert!(expected.mounts[0].readonly);
    }

    #[test]
    fn the_last_attempt_is_one_of_the_same_name() {
        let all = [
            attempt("a", "app", 1),
            attempt("b", "app", 3),
            attempt("c", "log", 9),
        ];
        for (of, last) in [(0, "b"), (1, "b"), (2, "c")] {
            assert_eq!(last_attempt(&all[of], &all).id, last);
        }
    }
}
