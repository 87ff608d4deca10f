add_executable(membership_test ${CMAKE_CURRENT_LIST_DIR}/membership_test.cpp)
target_link_libraries(membership_test PRIVATE epd_membership epd_options GTest::gtest_main)
epd_suites(membership_test LABEL unit TIMEOUT 300)
target_sources(membership_test PRIVATE ${CMAKE_CURRENT_LIST_DIR}/membership_join_test.cpp ${CMAKE_CURRENT_LIST_DIR}/membership_engines_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/membership_degrade_test.cpp ${CMAKE_CURRENT_LIST_DIR}/membership_waits_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/membership_messages_test.cpp ${CMAKE_CURRENT_LIST_DIR}/membership_nodes_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/membership_spanning_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/world.cpp ${CMAKE_CURRENT_LIST_DIR}/random_test.cpp ${CMAKE_CURRENT_LIST_DIR}/cluster_agent_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cluster_coordinator_test.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cluster_hostile_test.cpp)
