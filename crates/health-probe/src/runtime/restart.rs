//! Containers that have ended are made and started again.

use super::config::{ContainerConfig, ContainerMetadata, Info, PodSandboxConfig};
use super::messages::{
    CREATED, Container, ContainerId, ContainerList, ContainerStatusResponse,
    CreateContainerRequest, Nothing, PodSandboxStatusResponse, StatusRequest,
};
use super::{LONG_PATIENCE, PATIENCE, Reason, Runtime, RuntimeError};

impl Runtime {
    /// Makes the next container from the configuration of one that has ended, in the same pod, starts it, and removes the
    /// one that has ended. If there is a later attempt already, because an agent was killed on its way, that one is
    /// started unless it was. Returns the ID of the later one.
    ///
    /// Configuration is what the runtime tells in the details of a container. What is not of CRI 1.33 or earlier is not
    /// taken over.
    pub async fn restart(&self, container_id: &str) -> Result<String, RuntimeError> {
        let containers: ContainerList = self
            .call("ListContainers", container_id, Nothing {}, PATIENCE)
            .await?;
        let is_ended = |one: &&Container| one.id == container_id;
        let Some(ended) = containers.containers.iter().find(is_ended) else {
            let reason = Reason::Unusable("there is no such container any more".to_owned());
            return Err(self.error("ListContainers", container_id, reason));
        };
        let later = later_attempt(ended, &containers.containers);
        let id = match later {
            Some(later) => later.id.clone(),
            None => self.make_next(ended).await?,
        };
        if later.is_none_or(|later| later.state == CREATED) {
            let request = ContainerId {
                container_id: id.clone(),
            };
            self.call::<_, Nothing>("StartContainer", &id, request, LONG_PATIENCE)
                .await?;
        }
        let request = ContainerId {
            container_id: container_id.to_owned(),
        };
        let removed = self.call::<_, Nothing>("RemoveContainer", container_id, request, PATIENCE);
        match removed.await {
            Err(error) if !error.is_not_found() => {
                // Its successor runs, and whoever runs pods collects what is left.
                tracing::warn!(%error, "an ended container stays");
            }
            _ => {}
        }
        Ok(id)
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
            let why = "its details lack its configuration".to_owned();
            unusable(method, &ended.id, why)
        })?;
        let pod = &ended.pod_sandbox_id;
        let method = "PodSandboxStatus";
        let status: PodSandboxStatusResponse =
            self.call(method, pod, request(pod), PATIENCE).await?;
        let info = Info::<PodSandboxConfig>::read(&status.info)
            .map_err(|why| unusable(method, pod, why))?;
        let pod_config = info.config.ok_or_else(|| {
            let why = "its details lack its configuration".to_owned();
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

/// The same once more: the next attempt, with a log of its own where the name of the log says which attempt it is of.
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

/// The last attempt of the same container, if it is a later one.
fn later_attempt<'a>(ended: &Container, all: &'a [Container]) -> Option<&'a Container> {
    let key = |one: &Container| {
        let metadata = one.metadata.clone().unwrap_or_default();
        (one.pod_sandbox_id.clone(), metadata.name)
    };
    let attempt = |one: &Container| one.metadata.as_ref().map(|metadata| metadata.attempt);
    let same = all.iter().filter(|one| key(one) == key(ended));
    let later = same.filter(|one| attempt(one) > attempt(ended));
    later.max_by_key(|one| attempt(one))
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
    fn a_later_attempt_is_one_of_the_same_name() {
        let all = [
            attempt("a", "app", 1),
            attempt("b", "app", 3),
            attempt("c", "log", 9),
        ];
        assert_eq!(later_attempt(&all[0], &all).unwrap().id, "b");
        assert_eq!(later_attempt(&all[1], &all), None);
        assert_eq!(later_attempt(&all[2], &all), None);
    }
}
